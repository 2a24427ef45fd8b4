"""What an image may be, how it comes in messages, and what is kept of images."""

from __future__ import annotations

import os
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("PIL")

from cases.pictures import picture
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb

from nanoinfer.media.ahead import MediaThreads
from nanoinfer.media.images.opening import Opener
from nanoinfer.media.kept import Kept
from nanoinfer.media.messages import take_media
from nanoinfer.media.spans import Encoded

# What an image may be


def written(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def test_an_image_may_be_given_in_many_ways(tmp_path: Path) -> None:
    image = picture(5, 7)
    (tmp_path / "a.png").write_bytes(written(image))
    array = np.asarray(image)
    url = "data:image/png;base64," + b64encode(written(image)).decode()
    sources = [image, written(image), bytearray(written(image)), url, "a.png", tmp_path / "a.png", array]
    sources.append(f"file://{tmp_path}/a.png")
    for source in sources:
        opened = Opener(tmp_path).open("image", source)
        assert opened.mode == "RGB"
        assert np.array_equal(np.asarray(opened), array)
    assert np.array_equal(np.asarray(Opener().open("image", array[:, :, :1]))[:, :, 2], array[:, :, 0])


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_threads_may_share_an_image_that_is_not_decoded_yet(kind: str) -> None:
    """As Image.open returns it."""
    file = written(Image.fromarray(np.random.default_rng(0).integers(0, 256, (500, 500, 3), dtype=np.uint8)), kind)
    expected = np.asarray(Image.open(BytesIO(file)))
    with ThreadPoolExecutor(8) as pool:
        for _ in range(4):
            for opened in pool.map(Opener().open, ["image"] * 8, [Image.open(BytesIO(file))] * 8):
                assert np.array_equal(np.asarray(opened), expected)


def test_an_image_is_turned_as_its_camera_noted() -> None:
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        file = written(picture(8, 16), exif=exif)
        expected = ImageOps.exif_transpose(Image.open(BytesIO(file)))
        assert np.array_equal(np.asarray(Opener().open("image", file)), np.asarray(expected))


def test_a_note_that_cannot_be_read_turns_nothing() -> None:
    file = written(picture(8, 16), exif=b"no notes")
    with pytest.raises(SyntaxError):
        Image.open(BytesIO(file)).getexif()
    assert np.array_equal(np.asarray(Opener().open("image", file)), np.asarray(picture(8, 16)))


def test_prompts_may_share_an_image_that_is_not_read_yet() -> None:
    """PIL reads a file when its pixels are asked for, and not for two threads at once."""
    exif = Image.Exif()
    exif[0x0112] = 6
    file = written(picture(400, 300), "JPEG", exif=exif)
    wanted, opener = np.asarray(Opener().open("image", file)), Opener()
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            shared = Image.open(BytesIO(file))
            opened = list(pool.map(lambda image: opener.open("image", image), [shared] * 16))
            assert all(np.array_equal(np.asarray(image), wanted) for image in opened)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L"])
def test_what_is_transparent_is_white(mode: str) -> None:
    """As in transformers."""
    image = picture(5, 7)
    image.putalpha(picture(5, 7, seed=1).convert("L"))
    image = image.convert(mode)
    if mode == "P":
        image.info["transparency"] = 3
    file = written(image)
    for source, given in ((image, image), (file, Image.open(BytesIO(file)))):
        assert np.array_equal(np.asarray(Opener().open("image", source)), convert_to_rgb(given, return_numpy=True))


def closed() -> Image.Image:
    """Return an image whose file was closed before it was decoded."""
    with Image.open(BytesIO(written(picture(2, 2)))) as image:
        return image


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("http://host/a.png", "nothing is fetched"),
        ("https://host/a.png", "is 'https://host/a.png': nothing is fetched; must be a PIL image"),
        ("data:image/png,abc", "must be data:image/...;base64,..."),
        ("data:image/png;base64,%%%", "must be base64"),
        ("data:image/png;base64,\xe9", "must be base64"),
        (b"no image", "cannot be read as an image: must be a file of BMP, .*, WEBP$"),
        (written(picture(40, 40))[:-900], "cannot be read as an image"),
        (written(picture(2, 2), "EPS"), "cannot be read as an image"),  # PIL would run a program for it
        (7, "is 7: must be a PIL image"),
        (np.zeros((4, 4, 3)), r"is an array of float64, \[4, 4, 3\]: must be of uint8"),
        (np.zeros((3, 4, 9), np.uint8), "must be of uint8"),
        (np.zeros((0, 4, 3), np.uint8), "with a pixel"),
        (Image.new("L", (0, 4)), "has 0 x 4 pixels: must have 1 to [0-9]+"),
        (memoryview(b"n o   i m a g e")[::2], "cannot be read as an image"),
        (closed(), r"cannot be read as an image: \S"),
    ],
)
def test_what_is_no_image_is_named(source: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^image 0.*{message}"):
        Opener(tmp_path).open("image 0", source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("../secret.png", "must be in image_folder=.*, links followed"),
        ("sub/../../secret.png", "must be in"),
        ("../images secret/a.png", "must be in"),
        ("/etc/passwd", "must be in"),
        ("file:///etc/passwd", "must be in"),
        ("file://../secret.png", "must be in"),
        ("file://%2e%2e/secret.png", "must be in"),
        ("file://sub/%2E%2E%2f%2E%2E%2fsecret.png", "must be in"),
        ("file://%252e%252e/secret.png", "no such file in"),
        ("%2e%2e/secret.png", "no such file in"),
        ("FILE:///etc/passwd", "nothing is fetched"),
        ("link.png", "must be in"),
        ("out/secret.png", "must be in"),
        ("circle.png", "cannot be read as an image: Symlink loop|no such file in"),  # the latter by Python 3.13
        ("a.png\0", "cannot be read as an image: .*embedded null"),
        ("file://a.png%00", "cannot be read as an image: .*embedded null"),
        ("a" * 5000, "cannot be read as an image"),
        ("~/secret.png", "no such file in"),
        ("nothing.png", "is 'nothing.png': no such file in"),
        ("sub", "no such file in"),
        ("", "no such file in"),
        ("pipe", "no such file in"),
        (Path("../secret.png"), "must be in"),
    ],
)
def test_no_file_outside_the_folder_is_read(source: str | Path, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    for place in (folder / "sub", tmp_path / "images secret"):
        place.mkdir(parents=True)
    for file in (tmp_path / "secret.png", tmp_path / "images secret" / "a.png", folder / "a.png"):
        file.write_bytes(written(picture(2, 2)))
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "out").symlink_to(tmp_path)
    (folder / "circle.png").symlink_to(folder / "circle.png")
    os.mkfifo(folder / "pipe")
    with pytest.raises(ValueError, match=f"^image 0.*({message})"):
        Opener(folder).open("image 0", source)


def test_links_may_lead_to_other_places_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "folder").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "sub").mkdir(parents=True)
    (tmp_path / "real" / "a b.png").write_bytes(written(picture(2, 2)))
    (tmp_path / "real" / "sub" / "link.png").symlink_to("../a b.png")
    opener = Opener(tmp_path / "folder")
    for source in ("sub/link.png", "sub/../a b.png", "file://a%20b.png", tmp_path / "real" / "a b.png"):
        assert opener.open("image", source).size == (2, 2)


def test_no_file_is_read_without_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(written(picture(2, 2)))
    with pytest.raises(ValueError, match="no file is read unless image_folder names the folder of images"):
        Opener().open("image", str(tmp_path / "a.png"))


def test_decompression_bombs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 150)
    with pytest.raises(ValueError, match=r"image cannot be read as an image: .*decompression bomb"):
        Opener().open("image", written(picture(20, 20)))
    with pytest.warns(Image.DecompressionBombWarning), pytest.raises(ValueError, match="20 x 10 pixels: must have 1"):
        Opener().open("image", written(picture(20, 10)))
    with pytest.raises(ValueError, match="image has 20 x 20 pixels: must have 1 to 150"):
        Opener().open("image", picture(20, 20))


def test_images_are_taken_out_of_messages() -> None:
    image = picture(2, 2)
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "what?"}]
    url = {"type": "image_url", "image_url": {"url": "data:a", "detail": "low"}}
    messages = [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": parts},
        {"role": "user", "content": [url, {"type": "image_url", "image_url": "b.png"}]},
    ]
    bare, (images, videos, _) = take_media("messages", messages)
    assert (images, videos) == ([image, "data:a", "b.png"], [])
    assert bare[0] is messages[0]
    assert bare[1] == {"role": "user", "content": [{"type": "image"}, parts[1]]}
    assert bare[2]["content"] == [{"type": "image"}, {"type": "image"}]
    assert parts[0]["image"] is image


@pytest.mark.parametrize("part", [{"type": "image"}, {"type": "image_url", "image_url": {}}])
def test_a_part_without_its_image_is_named(part: dict) -> None:
    with pytest.raises(ValueError, match=r"messages\[0\] has the part .*: must have an image under 'image"):
        take_media("messages", [{"role": "user", "content": [part]}])


# What is kept


def embeddings(count: int) -> Encoded:
    return Encoded(torch.zeros(count, 8), (torch.zeros(count, 8),))


def test_the_least_recently_used_goes_first() -> None:
    size = embeddings(1).num_bytes
    kept: Kept[Encoded] = Kept(3 * size)
    for key in (b"a", b"b", b"c"):
        kept.keep(key, embeddings(1))
    assert kept.find(b"a") is not None
    kept.keep(b"d", embeddings(2))
    assert [kept.find(key) is not None for key in (b"a", b"b", b"c", b"d")] == [True, False, False, True]
    assert kept.num_bytes == 3 * size


def test_what_is_too_large_is_not_kept() -> None:
    kept: Kept[Encoded] = Kept(2 * embeddings(1).num_bytes)
    kept.keep(b"a", embeddings(1))
    kept.keep(b"b", embeddings(3))
    assert kept.find(b"b") is None
    assert kept.find(b"a") is not None
    kept.clear()
    assert (kept.find(b"a"), kept.num_bytes) == (None, 0)


# Who prepares images


def test_threads_start_again_in_a_fork() -> None:
    threads = MediaThreads(2)
    assert threads.submit(int, "6").result() == 6
    child = os.fork()
    if not child:
        try:
            os._exit(threads.submit(int, "7").result(timeout=20))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
