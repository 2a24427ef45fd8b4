"""Chats: each message reaches the template in the form that it takes, whichever form the user gives."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nanoinfer import BUNDLED_MODEL
from nanoinfer.batch.lines.requests import read_job, read_line
from nanoinfer.config import Config
from nanoinfer.requests.chat.renderer import ChatRenderer
from nanoinfer.requests.inputs import Inputs


def each(body: str) -> str:
    """Return a template that writes `body` for each message m, behind its role."""
    return f"{{% for m in messages %}}<{{{{ m.role }}}}>{body}{{% endfor %}}"


PRINTED = each("{{ m.content }}")
LOOP = "{% for part in m.content or [] %}{{ part.text }}|{% endfor %}"
PARTS = each(LOOP)
EITHER = each("{% if m.content is string %}{{ m.content }}{% else %}" + LOOP + "{% endif %}")
TEMPLATES = {
    "printed": PRINTED,
    "added": each("{{ '' + m['content'] + '' }}"),
    "as JSON": each("{{ m.content | tojson }}"),
    "parts": PARTS,
    "parts in capitals": each("{% for p in m.content %}{{ p.text | upper }}|{% endfor %}"),
    "parts by type": each("{% for p in m.content if p['type'] == 'text' %}{{ p.text }}|{% endfor %}"),
    "first part": each("{{ m.content[0]['text'] }}"),
    "either": EITHER,
    "string or first part": each("{{ m.content if m.content is string else m.content[0].text }}"),
}
JOINED, IN_PARTS = "<user>But,\nsoft!", "<user>But,|soft!|"
SHOWN = {
    "printed": ("<user>But", JOINED),
    "added": ("<user>But", JOINED),
    "as JSON": ('<user>"But"', r'<user>"But,\nsoft!"'),
    "parts": ("<user>But|", IN_PARTS),
    "parts in capitals": ("<user>BUT|", "<user>BUT,|SOFT!|"),
    "parts by type": ("<user>But|", IN_PARTS),
    "first part": ("<user>But", JOINED),
    "either": ("<user>But", IN_PARTS),
    "string or first part": ("<user>But", JOINED),
}
TWO: dict[str, Any] = {
    "typed": [{"type": "text", "text": "But,"}, {"type": "text", "text": "soft!"}],
    "untyped": [{"text": "But,"}, {"text": "soft!"}],
    "strings": ["But,", "soft!"],
    "both": ("But,", {"type": "text", "text": "soft!"}),
    "of a table": [{"type": "text", "text": word, "image_url": None} for word in ("But,", "soft!")],
    "an array": np.array([{"type": "text", "text": "But,", "image": None}, {"type": "text", "text": "soft!"}]),
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(BUNDLED_MODEL)


@pytest.fixture
def render(tokenizer: PreTrainedTokenizerBase) -> Any:
    chats = ChatRenderer(tokenizer)

    def call(template: str, *messages: Any, **arguments: Any) -> str:
        return chats.render("messages[0]", messages, {"chat_template": template, **arguments})

    return call


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def call(arguments: Any, **message: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {
        "role": "assistant",
        **message,
        "tool_calls": [{"id": "willow123", "type": "function", "function": function}],
    }


class TestContent:
    @pytest.mark.parametrize("name", TEMPLATES)
    def test_a_string_is_shown_by_every_template(self, name: str, render: Any) -> None:
        assert render(TEMPLATES[name], user("But")) == SHOWN[name][0]

    @pytest.mark.parametrize("given", TWO)
    @pytest.mark.parametrize("name", TEMPLATES)
    def test_parts_are_shown_by_every_template(self, name: str, given: str, render: Any) -> None:
        message = user(TWO[given])
        before = copy.deepcopy(message)
        assert render(TEMPLATES[name], message) == SHOWN[name][1]
        assert str(message) == str(before)

    def test_transformers_shows_what_is_in_the_templates_form(
        self, tokenizer: PreTrainedTokenizerBase, render: Any
    ) -> None:
        for template, content in ((PRINTED, "But,"), (PARTS, TWO["typed"]), (EITHER, "But,"), (EITHER, TWO["typed"])):
            expected = tokenizer.apply_chat_template([user(content)], chat_template=template, tokenize=False)
            assert render(template, user(content)) == expected

    def test_no_parts_are_an_empty_text(self, render: Any) -> None:
        for template in (PRINTED, PARTS, EITHER):
            assert render(template, user([])) == "<user>"

    def test_each_role_may_take_another_form(self, render: Any) -> None:
        """As where a template prints the system message before it goes through the others."""
        template = (
            "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% set messages = messages[1:] %}"
            "{% endif %}" + PARTS
        )
        text = render(template, {"role": "system", "content": TWO["typed"]}, user("Who?"))
        assert text == "But,\nsoft!<user>Who?|"

    @pytest.mark.parametrize(
        "refuses",
        [
            "messages[0].role != 'system'",
            "messages | length < 2",
            "messages[-1].role != 'user'",
            "(messages[0].role == 'user') == (messages | length % 2 == 0)",
            "not topic",
        ],
    )
    def test_a_template_that_refuses_a_lone_message_is_tried_in_others(self, refuses: str, render: Any) -> None:
        template = f"{{% if {refuses} %}}{{{{ raise_exception('not so') }}}}{{% endif %}}" + PARTS
        chat = [{"role": "system", "content": "Be brief."}, user("Who?")]
        chat = chat[1:] if "% 2" in refuses else chat
        assert render(template, *chat, topic="x").endswith("<user>Who?|")

    def test_what_failed_without_an_argument_is_tried_again_with_it(self, render: Any) -> None:
        template = "{{ topic.name }}" + PARTS
        with pytest.raises(ValueError, match=r"messages\[0\]: the chat template does not take it: .*topic"):
            render(template, user("Who?"))
        assert render(template, user("Who?"), topic={"name": "x"}) == "x<user>Who?|"

    def test_a_role_that_is_not_shown_breaks_nothing(self, render: Any) -> None:
        template = "{% for m in messages if m.role == 'user' %}" + LOOP + "{% endfor %}"
        assert render(template, {"role": "critic", "content": "Boo"}, user("Who?")) == "Who?|"

    def test_named_templates_and_that_of_tools(self, tokenizer: PreTrainedTokenizerBase) -> None:
        several = copy.deepcopy(tokenizer)
        several.chat_template = {"default": PRINTED, "tool_use": PARTS, "other": EITHER}
        chats = ChatRenderer(several)
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        for arguments, text in (({}, JOINED), ({"tools": tools}, IN_PARTS), ({"chat_template": "other"}, IN_PARTS)):
            assert chats.render("messages", [user(TWO["typed"])], arguments) == text

    def test_a_message_is_continued_in_either_form(self, render: Any) -> None:
        for template, text in ((PRINTED, "<user>Who?<assistant>Rom"), (PARTS, "<user>Who?|<assistant>Rom")):
            for content in ("Rom", ["Rom"]):
                chat = [user("Who?"), {"role": "assistant", "content": content}]
                assert render(template, *chat, continue_final_message=True) == text

    @pytest.mark.parametrize("part", [{"type": "text"}, {"type": "text", "text": 5}, None, 5, ["a"]], ids=str)
    def test_a_part_that_is_no_text_is_refused(self, part: Any, render: Any) -> None:
        with pytest.raises(
            ValueError, match=r"messages\[0\]\[1\] has the part .*: must be a string, or a mapping whose"
        ):
            render(PRINTED, user("Who?"), user([part]))

    def test_values_of_a_table_that_are_missing_count_as_nothing(self, render: Any) -> None:
        template = each(
            "{% if 'name' in m %}named {% endif %}{% if m.tool_calls is defined %}calls {% endif %}{{ m.content }}"
        )
        assert render(template, {**user("Who?"), "name": None, "tool_calls": None}) == "<user>Who?"


CALLS = "{% for c in m.tool_calls or [] %}"
ONE = '{"a": "b"}'
ARGUMENTS = "{{ c.function.arguments | tojson }}{% endfor %}{% endif %}"


class TestToolCalls:
    @pytest.mark.parametrize(
        ("shows", "text"),
        [
            ("{{ c.function.arguments | tojson }}", ONE),
            ("{{ c.function | tojson }}", f'{{"name": "f", "arguments": {ONE}}}'),
            ("{{ c.function.arguments }}", ONE),
            ("{{ c.function.name + c.function.arguments }}", f"f{ONE}"),
            ("{% for key, value in c.function.arguments | items %}{{ key }}={{ value }}{% endfor %}", "a=b"),
            ("{% for key in c.function.arguments %}{{ key }}={{ c.function.arguments[key] }}{% endfor %}", "a=b"),
            (
                "{% set x = c.function.arguments %}{% if x is string %}{{ x }}{% else %}{{ x | tojson }}{% endif %}",
                ONE,
            ),
        ],
    )
    @pytest.mark.parametrize("before", ["{{ m.content }}", "{{ m.content + '' }}", ""], ids=["shown", "added", "none"])
    def test_arguments_are_shown_whether_they_are_a_mapping_or_json(
        self, shows: str, text: str, before: str, render: Any
    ) -> None:
        template = each(f"{before}{CALLS}{shows}{{% endfor %}}")
        asked = "Who?" if before else ""
        for arguments in ({"a": "b"}, ONE):
            for content in ({}, {"content": None}, {"content": ""}):
                message = call(arguments, **content)
                given = copy.deepcopy(message)
                assert render(template, user("Who?"), message) == f"<user>{asked}<assistant>{text}"
                assert message == given

    def test_a_template_may_show_calls_only_where_no_content_is(self, render: Any) -> None:
        """Clients write none in several ways."""
        template = each(f"{{% if m.content is defined %}}{{{{ m.content }}}}{{% else %}}{CALLS}{ARGUMENTS}")
        for content in ({}, {"content": None}, {"content": ""}, {"content": []}):
            assert render(template, user("Who?"), call({"a": "b"}, **content)) == f"<user>Who?<assistant>{ONE}"

    def test_a_template_may_read_a_call_without_its_wrapper(self, render: Any) -> None:
        template = each(f"{CALLS}{{{{ c.arguments | tojson }}}}{{% endfor %}}")
        message = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": ONE}]}
        assert render(template, user("Who?"), message) == f"<user><assistant>{ONE}"

    @pytest.mark.parametrize(
        "shows",
        [
            "{% if c.id[:5] != 'call_' %}{{ raise_exception('no id') }}{% endif %}{{ c.function.arguments | tojson }}",
            "{% if c.function.name == 'f' %}{{ c.function.arguments | tojson }}{% endif %}",
            '{"a": "{{ c.function.arguments[\'a\'] }}"}',
        ],
    )
    def test_where_a_template_shows_no_other_call_arguments_are_a_mapping(self, shows: str, render: Any) -> None:
        template = each(f"{CALLS}{shows}{{% endfor %}}")
        for arguments in ({"a": "b"}, ONE):
            message = call(arguments)
            message["tool_calls"][0]["id"] = "call_1"
            assert render(template, user("Who?"), message) == f"<user><assistant>{ONE}"

    def test_where_a_template_reads_entries_the_arguments_must_be_json(self, render: Any) -> None:
        read, printed = (each(f"{CALLS}{{{{ c.function.arguments{how} }}}}{{% endfor %}}") for how in (" | tojson", ""))
        for broken in ('{"a":', "[1]", "null"):
            assert render(printed, user("Who?"), call(broken)) == f"<user><assistant>{broken}"
            with pytest.raises(
                ValueError,
                match=r"^messages\[0\]\[1\]\.tool_calls\[0\]\.function\.arguments=.*must be a mapping or a JSON",
            ):
                render(read, user("Who?"), call(broken))
        for nothing in ("", None, {}):
            assert render(read, user("Who?"), call(nothing)) == "<user><assistant>{}"

    def test_other_letters_stay_as_they_are(self, render: Any) -> None:
        printed = each(f"{CALLS}{{{{ c.function.arguments }}}}{{% endfor %}}")
        assert render(printed, user("Who?"), call({"a": "Zoë"})) == '<user><assistant>{"a": "Zoë"}'

    def test_a_template_that_shows_no_calls_leaves_them_out(self, render: Any) -> None:
        for template in (PRINTED, PARTS, TEMPLATES["added"]):
            assert render(template, user([]), call("{no JSON")) == "<user><assistant>"

    def test_a_result_may_need_its_call(self, render: Any) -> None:
        """And the call may be shown only with its arguments as JSON."""
        template = each(
            "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}"
            "{% endif %}" + CALLS + "{{ '' + c.function.arguments }}{% endfor %}" + LOOP
        )
        result = {"role": "tool", "tool_call_id": "willow123", "content": "Romeo"}
        assert render(template, user("Who?"), call({"a": 1}), result) == '<user>Who?|<assistant>{"a": 1}<tool>Romeo|'


def test_every_way_in_gives_the_same_text() -> None:
    """`chat`, prompts that are chats, and lines of batch files; test_ray_data.py has the rows of Ray."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    tokenizer.chat_template = each(f"{LOOP}{CALLS}{{{{ c.function.arguments | tojson }}}}{{% endfor %}}")
    inputs = Inputs(Config(BUNDLED_MODEL, device="cpu"), tokenizer)
    messages = [user(TWO["of a table"]), call(ONE), user("Who?")]
    text = f"{IN_PARTS}<assistant>{ONE}<user>Who?|"
    (chat,) = inputs.check_chats(messages, None, {}).take_prompts()
    assert (chat.text, chat.token_ids) == (text, tokenizer.encode(text, add_special_tokens=False))
    line = read_line(json.dumps({"id": 1, "messages": messages}).encode(), 1)
    for prompt in ({"messages": messages}, {"messages": np.array(messages)}, read_job(line, {}, 0).prompt):
        assert inputs.check_one(prompt, None).text == text
    with pytest.raises(ValueError, match=r"^prompt\['messages'\]\[0\].tool_calls\[0\].function.arguments='{'"):
        inputs.check_one({"messages": [call("{")]}, None)
