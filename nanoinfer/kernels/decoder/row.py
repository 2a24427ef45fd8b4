"""All layers of a small dense decoder for a single row, in one launch.

A layer of such a model is read in a few microseconds, and the launches of its kernels cost twice as much. Here one
program on each multiprocessor goes through all layers, and has a share of each product's rows. Programs hand each
other vectors by words (see words.py). A program loads its share of a weight into registers while it waits for the
product's input.

    h --> q, k, v --> attention to a share of the keys --> the shares together --> o --> gate, up --> down --> h
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.attention.scores import in_log2
from nanoinfer.kernels.decoder.row_model import RowLayer, RowModel, RowShape, block_of
from nanoinfer.kernels.decoder.shares import (
    ADDRESSES,
    WAVE,
    address,
    dots,
    load_share,
    load_tiles,
    normed,
    places_of,
    receive_blocks,
    rounded,
    turned,
)
from nanoinfer.kernels.decoder.words import TURNS, publish, publish_some, receive, settled

WARPS = 8  # of a program: with so few, a thread has 255 registers
KEYS = 64  # in a tile


class DecoderRow:
    """decoder_row_reference as one launch, for a model that stays where it is, though nobody holds its layers here."""

    def __init__(
        self,
        model: RowModel,
        programs: int | None = None,
        words: Tensor | None = None,
        turn: Tensor | None = None,
    ) -> None:
        """programs: as for RowShape.of; words, turn: those of the same model's DecoderRow in another process"""
        self.shape = RowShape.of(model, programs)
        assert self.shape.divides()
        device = model.embeddings.device
        self._embeddings, self._last_norm, self._cos_sin = model.embeddings, model.last_norm, model.cos_sin
        self._numbers = model.eps, in_log2(model.scale, None)[0], len(model.layers)
        self._block_size = model.layers[0].k_cache.shape[1]
        addresses = [[part.data_ptr() for part in layer] for layer in model.layers]
        padding = [0] * (ADDRESSES.value - len(RowLayer._fields))
        self._table = torch.tensor([row + padding for row in addresses], dtype=torch.int64, device=device)
        if words is None:
            words = torch.zeros(2 * self.shape.words, dtype=torch.int32, device=device)
        self._words = words
        self._turn = torch.ones(1, dtype=torch.int32, device=device) if turn is None else turn

    def __call__(
        self, token: Tensor, position: Tensor, slot: Tensor, pages: Tensor, first_program: int | None = None
    ) -> Tensor:
        """See decoder_row_reference. first_program: launch this one alone; others run elsewhere"""
        shape, embeddings = self.shape, self._embeddings
        out = torch.empty((1, shape.hidden), dtype=embeddings.dtype, device=embeddings.device)
        _decoder_row_kernel[(shape.programs if first_program is None else 1,)](
            first_program or 0,
            token,
            embeddings,
            self._table,
            self._last_norm,
            out,
            self._words,
            self._turn,
            position,
            slot,
            pages,
            self._cos_sin,
            *self._numbers,
            HIDDEN=shape.hidden,
            KV_HEADS=shape.kv_heads,
            GROUP=shape.heads // shape.kv_heads,
            HEAD_DIM=shape.head_dim,
            INTER=shape.inter,
            BLOCK_SIZE=self._block_size,
            PROGRAMS=shape.programs,
            KEYS=KEYS,
            ATTENDED_BLOCK=block_of(shape.heads * shape.head_dim),
            INTER_BLOCK=block_of(shape.inter),
            QKV_TILE=tile_of(shape.qkv // shape.programs, 16),
            GATE_TILE=tile_of(shape.inter // shape.programs, 8),
            num_warps=WARPS,
            # All programs run at once, or none does: they wait for each other.
            **({"launch_cooperative_grid": True} if out.is_cuda else {}),
            enable_fp_fusion=True,
        )
        return out


def tile_of(rows: int, most: int) -> int:
    """Return the rows of a tile, a power of 2 that divides the rows of a share."""
    return min(rows & -rows, most)


@triton.jit(do_not_specialize=["first_program", "layers"])
def _decoder_row_kernel(
    first_program,
    token_ptr,
    embeddings_ptr,
    table_ptr,
    last_norm_ptr,
    out_ptr,
    words_ptr,
    turn_ptr,
    position_ptr,
    slot_ptr,
    pages_ptr,
    cos_sin_ptr,
    eps,
    factor,
    layers,
    HIDDEN: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INTER: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    KEYS: tl.constexpr,
    ATTENDED_BLOCK: tl.constexpr,
    INTER_BLOCK: tl.constexpr,
    QKV_TILE: tl.constexpr,
    GATE_TILE: tl.constexpr,
):
    dtype = out_ptr.dtype.element_ty
    HEADS: tl.constexpr = KV_HEADS * GROUP
    ATTENDED: tl.constexpr = HEADS * HEAD_DIM
    QKV: tl.constexpr = ATTENDED + 2 * KV_HEADS * HEAD_DIM
    SPLITS: tl.constexpr = PROGRAMS // KV_HEADS
    # A program's share: rows of each product, and numbers of attention's result.
    QKV_ROWS: tl.constexpr = QKV // PROGRAMS
    OWN: tl.constexpr = HIDDEN // PROGRAMS
    PAIRS: tl.constexpr = INTER // PROGRAMS
    COLUMNS: tl.constexpr = GROUP * HEAD_DIM // SPLITS
    # Where a layer's words lie. Layers take turns at two such places, so that no address stays in a register.
    AT_QKV: tl.constexpr = HIDDEN
    AT_PARTIAL: tl.constexpr = AT_QKV + QKV
    AT_LSE: tl.constexpr = AT_PARTIAL + ATTENDED * SPLITS
    AT_ATTENDED: tl.constexpr = AT_LSE + HEADS * SPLITS
    AT_O: tl.constexpr = AT_ATTENDED + ATTENDED
    AT_ACT: tl.constexpr = AT_O + HIDDEN
    WORDS: tl.constexpr = AT_ACT + INTER

    program = first_program + tl.program_id(0)
    kv_head, split = program // SPLITS, program % SPLITS
    k = tl.arange(0, HIDDEN)
    d = tl.arange(0, HEAD_DIM)
    n = tl.arange(0, KEYS)
    own = program * OWN + tl.arange(0, OWN)
    column = split * COLUMNS + tl.arange(0, COLUMNS)

    first_turn = tl.load(turn_ptr)
    token = tl.load(token_ptr).to(tl.int64)
    position = tl.maximum(tl.load(position_ptr), 0)
    slot = tl.load(slot_ptr).to(tl.int64)
    embedded = tl.load(embeddings_ptr + token * HIDDEN + own)
    publish(words_ptr + own, embedded.to(tl.float32), first_turn % TURNS)

    # A row for each query of the KV head's group, one for its key, and one for its value.
    BLOCK_H: tl.constexpr = triton.next_power_of_2(GROUP + 2)
    row = tl.arange(0, BLOCK_H)
    is_query = (row < GROUP)[:, None]
    head = tl.where(row < GROUP, kv_head * GROUP + row, HEADS + kv_head + tl.where(row > GROUP, KV_HEADS, 0))
    HALF: tl.constexpr = HEAD_DIM // 2
    partner = d ^ HALF  # of a rotated pair
    in_heads = head[:, None] * HEAD_DIM + d[None, :]
    partner_in_heads = head[:, None] * HEAD_DIM + partner[None, :]
    angle = cos_sin_ptr + position * HEAD_DIM + d % HALF
    cos = tl.load(angle)[None, :]
    sin = (tl.load(angle + HALF) * tl.where(d < HALF, -1.0, 1.0))[None, :]
    # The older keys are divided among the KV head's programs. The last of these takes the new one, too: in the last
    # place of its first tile, where no program has an older one.
    share = tl.cdiv(position, SPLITS)
    first_key = split * share
    keys_end = tl.minimum(first_key + share, position)
    seen = (first_key + n < keys_end) & (n < KEYS - 1)
    places = places_of(pages_ptr, first_key + n, seen, kv_head, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    takes_new = split == SPLITS - 1
    is_new = (n == KEYS - 1) & takes_new

    qkv_ptr = address(table_ptr, 0, 0, dtype)
    mixer_weight = tl.load(address(table_ptr, 0, 4, dtype) + k)
    q_norm_ptr, k_norm_ptr = address(table_ptr, 0, 6, dtype), address(table_ptr, 0, 7, dtype)
    k_cache_ptr, v_cache_ptr = address(table_ptr, 0, 8, dtype), address(table_ptr, 0, 9, dtype)
    h = tl.zeros([HIDDEN], tl.float32)
    for layer in tl.range(layers, disable_licm=True):
        turn = (first_turn + layer) % TURNS
        h_words = words_ptr + layer % 2 * WORDS
        next_h_words = words_ptr + (layer + 1) % 2 * WORDS

        # Queries, keys and values
        qkv_tiles = load_tiles(qkv_ptr, program * QKV_ROWS, QKV_ROWS, QKV_TILE, HIDDEN)
        o_ptr, gate_up_ptr = address(table_ptr, layer, 1, dtype), address(table_ptr, layer, 2, dtype)
        down_ptr, mlp_norm_ptr = address(table_ptr, layer, 3, dtype), address(table_ptr, layer, 5, dtype)
        weight = tl.where(is_query, tl.load(q_norm_ptr + d)[None, :], tl.load(k_norm_ptr + d)[None, :])
        partner_weight = tl.where(
            is_query, tl.load(q_norm_ptr + partner)[None, :], tl.load(k_norm_ptr + partner)[None, :]
        )
        keys = tl.load(k_cache_ptr + places, mask=seen[:, None], other=0.0)
        values = tl.load(v_cache_ptr + places, mask=seen[:, None], other=0.0)
        h += receive((h_words + k,), turn)[0]
        h = rounded(h, dtype)
        x = (tl.reshape(normed(h, mixer_weight, eps, HIDDEN, dtype), [HIDDEN // WAVE, WAVE]),)
        for t in tl.static_range(QKV_ROWS // QKV_TILE):
            r = program * QKV_ROWS + t * QKV_TILE + tl.arange(0, QKV_TILE)
            publish(h_words + AT_QKV + r, rounded(dots((qkv_tiles[t],), x), dtype), turn)

        # Attention to a share of the keys
        o_tiles = load_share(o_ptr, program * OWN, OWN, ATTENDED, ATTENDED_BLOCK)
        qkv_words = h_words + AT_QKV
        theirs = receive((qkv_words + in_heads, qkv_words + partner_in_heads), turn)
        heads_turned = turned(theirs[0], theirs[1], weight, partner_weight, cos, sin, eps, HEAD_DIM, dtype)
        heads = settled(tl.where((row <= GROUP)[:, None], heads_turned, theirs[0]).to(dtype), turn)
        new_key = tl.sum(tl.where((row == GROUP)[:, None], heads.to(tl.float32), 0.0), axis=0).to(dtype)
        new_value = tl.sum(tl.where((row == GROUP + 1)[:, None], heads.to(tl.float32), 0.0), axis=0).to(dtype)
        if takes_new & (slot >= 0):
            place = (slot * KV_HEADS + kv_head) * HEAD_DIM + d
            tl.store(k_cache_ptr + place, new_key)
            tl.store(v_cache_ptr + place, new_value)
        keys = tl.where(is_new[:, None], new_key[None, :], keys)
        values = tl.where(is_new[:, None], new_value[None, :], values)
        q = tl.reshape(tl.broadcast_to(heads[None, :, :], [16 // BLOCK_H, BLOCK_H, HEAD_DIM]), [16, HEAD_DIM])
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * factor
        scores = tl.where((seen | is_new)[None, :], scores, -1e30)
        top = tl.max(scores, axis=1)
        exps = tl.where((seen | is_new)[None, :], tl.exp2(scores - top[:, None]), 0.0)
        total = tl.sum(exps, axis=1)
        acc = tl.dot(exps.to(dtype), values, input_precision="ieee")
        first_more = first_key + KEYS - 1
        more = first_more + n < keys_end
        more_places = places_of(pages_ptr, first_more + n, more, kv_head, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        keys = tl.load(k_cache_ptr + more_places, mask=more[:, None], other=0.0)
        values = tl.load(v_cache_ptr + more_places, mask=more[:, None], other=0.0)
        for start in tl.range(first_more, keys_end, KEYS, num_stages=1, disable_licm=True):
            more = start + KEYS + n < keys_end
            more_places = places_of(pages_ptr, start + KEYS + n, more, kv_head, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
            next_keys = tl.load(k_cache_ptr + more_places, mask=more[:, None], other=0.0)
            next_values = tl.load(v_cache_ptr + more_places, mask=more[:, None], other=0.0)
            scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * factor
            scores = tl.where((start + n < keys_end)[None, :], scores, -1e30)
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            exps = tl.exp2(scores - new_top[:, None])
            rescale = tl.exp2(top - new_top)
            total = total * rescale + tl.sum(exps, axis=1)
            acc = acc * rescale[:, None] + tl.dot(exps.to(dtype), values, input_precision="ieee")
            top, keys, values = new_top, next_keys, next_values
        total = tl.maximum(total, 1e-30)
        query = tl.arange(0, 16)
        place = (kv_head * GROUP + query) * SPLITS + split
        publish_some(h_words + AT_LSE + place, top + tl.log2(total), turn, query < GROUP)
        publish_some(
            h_words + AT_PARTIAL + place[:, None] * HEAD_DIM + d[None, :],
            acc / total[:, None],
            turn,
            tl.broadcast_to((query < GROUP)[:, None], [16, HEAD_DIM]),
        )

        # The shares together, a few numbers in each program
        mlp_weight = tl.load(mlp_norm_ptr + k)
        place = (kv_head * GROUP + column // HEAD_DIM)[:, None] * SPLITS + tl.arange(0, SPLITS)[None, :]
        in_partial = place * HEAD_DIM + (column % HEAD_DIM)[:, None]
        parts = receive((h_words + AT_PARTIAL + in_partial, h_words + AT_LSE + place), turn)
        weights = tl.exp2(parts[1] - tl.max(parts[1], axis=1)[:, None])
        mixed = tl.sum(parts[0] * weights, axis=1) / tl.sum(weights, axis=1)
        publish(h_words + AT_ATTENDED + kv_head * GROUP * HEAD_DIM + column, rounded(mixed, dtype), turn)

        # Attention's output
        xs = receive_blocks(h_words + AT_ATTENDED, turn, ATTENDED, ATTENDED_BLOCK, dtype)
        publish(h_words + AT_O + own, rounded(dots(o_tiles, xs), dtype), turn)

        # Gates and ups
        gates = load_tiles(gate_up_ptr, program * PAIRS, PAIRS, GATE_TILE, HIDDEN)
        ups = load_tiles(gate_up_ptr, INTER + program * PAIRS, PAIRS, GATE_TILE, HIDDEN)
        following = tl.minimum(layer + 1, layers - 1)
        qkv_ptr, mixer_norm_ptr = address(table_ptr, following, 0, dtype), address(table_ptr, following, 4, dtype)
        q_norm_ptr, k_norm_ptr = address(table_ptr, following, 6, dtype), address(table_ptr, following, 7, dtype)
        k_cache_ptr, v_cache_ptr = address(table_ptr, following, 8, dtype), address(table_ptr, following, 9, dtype)
        h += receive((h_words + AT_O + k,), turn)[0]
        h = rounded(h, dtype)
        x = (tl.reshape(normed(h, mlp_weight, eps, HIDDEN, dtype), [HIDDEN // WAVE, WAVE]),)
        for t in tl.static_range(PAIRS // GATE_TILE):
            gate, up = rounded(dots((gates[t],), x), dtype), rounded(dots((ups[t],), x), dtype)
            pair = program * PAIRS + t * GATE_TILE + tl.arange(0, GATE_TILE)
            act = rounded(rounded(gate * tl.sigmoid(gate), dtype) * up, dtype)
            publish(h_words + AT_ACT + pair, act, turn)

        # Down
        down_tiles = load_share(down_ptr, program * OWN, OWN, INTER, INTER_BLOCK)
        mixer_weight = tl.load(mixer_norm_ptr + k)
        xs = receive_blocks(h_words + AT_ACT, turn, INTER, INTER_BLOCK, dtype)
        publish(next_h_words + own, rounded(dots(down_tiles, xs), dtype), (turn + 1) % TURNS)

    weight = tl.load(last_norm_ptr + k)
    h += receive((words_ptr + layers % 2 * WORDS + k,), (first_turn + layers) % TURNS)[0]
    if program == 0:
        tl.store(out_ptr + k, normed(rounded(h, dtype), weight, eps, HIDDEN, dtype))
        tl.store(turn_ptr, (first_turn + layers + 1) % TURNS)  # all programs have read it: they have sent h
