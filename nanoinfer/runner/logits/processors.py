"""LogitsProcessors: filters, penalties, log-probabilities, masks: all that needs the logits.

A step draws for every row by its temperature alone. For a row that wants more, another draw takes the place of that
one, from logits that are changed as its request wants. The other rows do not notice. Where a step verifies guesses,
such a row is drawn for behind each of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.kernels.sampling.distribution import distribution
from nanoinfer.kernels.sampling.draw import DrawnLines, draw_lines
from nanoinfer.kernels.sampling.entropy import entropies, entropy_parts
from nanoinfer.parallel.tensor_parallel import TensorParallel
from nanoinfer.runner.logits.batch_processors import BatchProcessors
from nanoinfer.runner.logits.line_values import LineValues
from nanoinfer.runner.logits.lines import Lines, StepLines
from nanoinfer.runner.logits.logprobs import FEW, LogProbs
from nanoinfer.runner.logits.processor_group import LogitsProcessorGroup
from nanoinfer.runner.logits.settings import changes_logits, has_mask_alone, is_plain, needs_tokens
from nanoinfer.runner.logits.token_history import PLANNED_TOKENS, TokenHistory
from nanoinfer.runner.message import ChunkMessage, DecodeMessage, LogitsMessage, MaskMessage
from nanoinfer.runner.results.extras import Extras
from nanoinfer.runner.transfer import upload

LOGITS_AT_ONCE = 64  # rows, or tokens of a prompt, whose logits are in float32 at a time
COPIES = 8  # of these logits and of their rows' tokens, while torch computes with them
COPIES_OF_KERNELS = 3  # while our own kernels change them, which then change more rows at a time


class LogitsProcessors:
    """The rows that want more than a temperature, and the tokens so far of those whose penalties or bans need them.

    wanted: row -> its request's settings; a column of the RowTable
    """

    def __init__(
        self,
        vocab_size: int,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        tp: TensorParallel,
        is_processed: bool,
        is_alone: bool = False,
        is_deterministic: bool = False,
        max_guesses: int = 0,
        classes: BatchProcessors | None = None,
    ) -> None:
        """Store the shapes.

        is_processed: whether log-probabilities are those of the distributions that tokens are drawn from
        is_alone: whether each row is drawn by itself
        is_deterministic: whether rows that need torch's own functions are drawn one by one: these functions' bits may
            depend on the number of rows
        max_guesses: of a row, in a step
        classes: of a caller's, which change the logits of all rows; None: the LLM has none
        """
        self._classes = classes
        self.wanted: dict[int, LogitsMessage] = {}
        self.vocab_size = vocab_size
        self.device = device
        self.tp = tp
        self.is_processed = is_processed
        self._max_num_seqs, self._max_guesses = max_num_seqs, max_guesses
        self._most_lines = max_num_seqs * (1 + max_guesses)
        self._is_alone, self._is_deterministic = is_alone, is_deterministic
        self._groups: list[LogitsProcessorGroup] = []  # of all wanted rows, kept while these are the same
        self._planned_tokens = min(max_model_len, PLANNED_TOKENS)
        self._history = TokenHistory(max_num_seqs, device)

    @property
    def _most_changed(self) -> int:
        """Of how many lines logits may be changed at a time, if nothing else is told of them."""
        if self.device.type == "cpu" or self.tp.size > 1:
            return LOGITS_AT_ONCE
        return LOGITS_AT_ONCE * COPIES // COPIES_OF_KERNELS

    @property
    def working_bytes(self) -> int:
        """The device memory, in bytes, that the tokens so far and a running draw may take.

        The tokens of rows that are longer than planned take some of what gpu_memory_utilization leaves.
        """
        drawn = COPIES * LOGITS_AT_ONCE * (self.vocab_size + self._planned_tokens)
        changed = 0 if self._classes is None else self._classes.working_bytes
        return (drawn + self._max_num_seqs * self._planned_tokens) * torch.float32.itemsize + changed

    @property
    def changes_all(self) -> bool:
        """Whether classes change the logits of the rows that there are; trials and captures have none."""
        return self._classes is not None and self._classes.has_rows

    @property
    def draws_anew(self) -> bool:
        """Whether a step draws otherwise than by temperatures alone, which is captured."""
        return bool(self.wanted) or self.changes_all

    def prompt_tokens_at_once(self, chunks: list[ChunkMessage]) -> int:
        """Return for how many tokens of these chunks the log-probabilities may be computed together."""
        are_alone = self._is_alone or (self._is_deterministic and any(chunk.num_logprobs for chunk in chunks))
        return 1 if are_alone else LOGITS_AT_ONCE

    def move(self, source: int, destination: int) -> None:
        """Put a row in the place of another, which has left."""
        if self._classes is not None:
            self._classes.move(source, destination)
        if source in self.wanted or destination in self.wanted:
            self._groups = []
            self.wanted.pop(destination, None)
            if source in self.wanted:
                self.wanted[destination] = self.wanted.pop(source)
            self._history.move(source, destination)

    def leave(self, num_rows: int) -> None:
        """Forget the rows from this one on."""
        if self._classes is not None:
            self._classes.leave(num_rows)
        for row in [row for row in self.wanted if row >= num_rows]:
            self._groups = []
            del self.wanted[row]
            self._history.drop(row)

    def begin(self, message: DecodeMessage) -> None:
        """Note that each row gets a token from a step, or several, once the rows are those of the step."""
        if self.wanted:
            self._history.step(1 + min(message.guesses, self._max_guesses), message.max_context_len + 1)

    def join(self, row: int, message: LogitsMessage | None, told: LogitsMessage | None) -> None:
        """Add a row, behind all others. message: what it wants beside a temperature; told: what classes are told"""
        if self._classes is not None and told is not None:
            self._classes.join(told)
        if message is None:
            return
        self._groups = []
        self.wanted[row] = message
        if needs_tokens(message.params):
            self._history.join(row, message.token_ids)

    def change_all(self, step: StepLines, rows: slice, first_id: int, extras: Extras) -> StepLines:
        """Return the lines of rows with logits that classes have changed. first_id: of this rank's token ids"""
        assert self._classes is not None
        whole = self._classes.change(self.gather(step.logits), rows, extras)
        own = whole[:, first_id:][:, : step.logits.shape[1]]
        return step._replace(logits=own, raw=step.logits)

    def note(self, rows: slice, drawn: Tensor) -> None:
        """Let classes know the tokens that rows have got. drawn: [rows] int32"""
        if self._classes is not None and self._classes.has_rows:
            self._classes.note(rows, drawn)

    def draw(self, step: StepLines, drawn: Tensor, extras: Extras, masks: MaskMessage | None = None) -> None:
        """Draw for the rows of `wanted`, from step.first_row on.

        drawn: [places] int32, what the temperatures alone have drawn; one below 0 stays, others become the new
            tokens, or NONE_LEFT where none is left
        extras: gets what the rows' requests ask for beside the tokens
        masks: for the guided ones among these rows; None if no row is guided
        """
        if step.first_row > 0:
            groups = self._divide([row for row in self.wanted if row >= step.first_row])
        else:
            groups = self._groups = self._groups or self._divide(list(self.wanted))
        groups_masks = self._upload_masks(masks, [len(group.row_numbers) for group in groups if group.is_guided])
        for group in groups:
            own_masks = next(groups_masks) if group.is_guided else None
            lines, told = group.lines(step, self._max_guesses, own_masks), Extras()
            if group.needs_tokens and step.places is not None:
                at, guessed = lines.places, step.places
                self._history.write(group.row_numbers[lines.rows], guessed.positions[at], guessed.tokens[at])
            for some in lines.split(group.at_once):
                self._draw(group, some, step, drawn, told)
            if group.calls_functions:
                extras.faults |= group.faults(step.first_row)
            if group.asks:
                extras.logprobs.append(LogProbs.joined(told.logprobs))
            if group.asks_kept:
                extras.kept_tokens.append(LineValues.joined(told.kept_tokens))
            if group.asks_entropy:
                extras.entropies.append(LineValues.joined(told.entropies))
        self._count_draw(step.first_row)

    def _draw(self, group: LogitsProcessorGroup, lines: Lines, step: StepLines, drawn: Tensor, extras: Extras) -> None:
        """Draw for some lines of a group; the others are those of `draw`."""
        numbers, at = group.row_numbers[lines.rows], lines.places
        own = at if step.places is None else numbers  # see StepLines.first_row
        how = step.temperatures, step.seeds, step.positions
        if group.has_masks_alone and self.tp.size == 1:
            draw_lines(step.logits, *how, DrawnLines(at, own, lines.masks), drawn)
            return
        temperatures, positions = step.temperatures[own], step.positions[at]
        if group.has_entropies_alone and not (self._is_deterministic and self.tp.size > 1):
            parts = self._gather_parts(entropy_parts(step.logits, temperatures, at, width=self._share))
            extras.entropies += group.entropies(entropies(parts, temperatures), lines, step.first_row)
            return
        logits = self.gather(group.select(step, lines))
        history = self._history.of(numbers) if group.needs_tokens else None
        penalized, allowed = group.change(logits, temperatures, positions, history, lines)
        cutoff = group.find_cutoff(allowed, temperatures, lines.rows)
        if group.is_drawn:
            draw_lines(allowed, *how, DrawnLines(at, own), drawn, cutoff, picked=True)
        if group.asks_entropy:
            measured = entropies(entropy_parts(allowed, temperatures, cutoff=cutoff), temperatures)
            extras.entropies += group.entropies(measured, lines, step.first_row)
        if not (group.needs_tokens or group.asks or group.asks_kept):
            return
        token_ids = drawn[at].clamp(min=0)
        if group.needs_tokens:
            self._history.write(numbers, positions, token_ids)
        if group.asks_kept or (group.asks and self.is_processed):
            kept = distribution(allowed, temperatures, token_ids, cutoff)
            extras.kept_tokens += group.kept_tokens(penalized, kept, temperatures, lines, step.first_row)
            logits = kept if self.is_processed else logits
        if group.asks and step.raw is not None and not self.is_processed:
            logits = self.gather(group.select(step._replace(logits=step.raw), lines))
        extras.logprobs += group.logprobs(logits, token_ids, lines, step.first_row)

    def _upload_masks(self, masks: MaskMessage | None, sizes: list[int]) -> Iterator[Tensor]:
        """Yield the masks of each group of guided rows, [lines, words] int32 on the device; sizes: those groups'

        Those of its rows' last tokens come first, then those of their guesses, as number_lines has them.
        """
        if masks is None:
            return
        words = upload(masks.words, self.device).view(len(masks.guesses), -1)
        behind = upload(masks.behind, self.device).view(-1, words.shape[1]) if masks.behind else words[:0]
        begin, first = 0, 0
        for size in sizes:
            count = sum(masks.guesses[begin : begin + size])
            own = words[begin : begin + size]
            yield torch.cat([own, behind[first : first + count]]) if count else own
            begin, first = begin + size, first + count

    def _count_draw(self, first_row: int) -> None:
        """Count down min_tokens. A row that comes to 0 may end, and leaves `wanted` if it wants nothing else."""
        for row in [row for row, message in self.wanted.items() if row >= first_row and message.num_suppressed]:
            message = self.wanted[row]
            message.num_suppressed -= 1
            if message.num_suppressed == 0:
                self._groups = []
                message.suppressed = ()
                if is_plain(message.params):
                    del self.wanted[row]

    def gather(self, logits: Tensor) -> Tensor:
        """Gather [n, this rank's token ids] of each rank into [n, vocabulary] on every rank."""
        if self.tp.size == 1:
            return logits
        padded = F.pad(logits, (0, self._share - logits.shape[1]))
        return self.tp.gather_features(padded)[:, : self.vocab_size]

    @property
    def _share(self) -> int:
        """How many token ids a rank has, at most: see VocabParallelEmbedding."""
        return -(-self.vocab_size // self.tp.size)

    def _gather_parts(self, parts: Tensor) -> Tensor:
        """Gather the parts of entropies of each rank's share, [n, slices, 3], into those of all on every rank."""
        if self.tp.size == 1:
            return parts
        return self.tp.gather_features(parts.view(len(parts), -1)).view(len(parts), -1, 3)

    def _divide(self, rows: list[int]) -> list[LogitsProcessorGroup]:
        """Put rows that need no logits in float32 in groups, the others in groups that fit the memory.

        Rows that want the mask of allowed_token_ids alone have groups of their own. So have guided rows, in ascending
        order, as their masks come, and rows that are drawn by themselves; if one of the guided rows is such a row, all
        of them.
        """
        rows = sorted(rows)
        alone = {row for row in rows if self._is_drawn_alone(self.wanted[row])}
        in_float32 = [row for row in rows if self._needs_float32(self.wanted[row])]
        plain = sorted(set(rows).difference(in_float32))
        masked = {row for row in in_float32 if has_mask_alone(self.wanted[row])}
        guided = [row for row in in_float32 if self.wanted[row].params.is_guided]
        others = sorted(set(in_float32).difference(masked, guided))
        telling = {row for row in others if self._tells_of_changes(self.wanted[row])}
        if alone.intersection(guided) or len(set(map(self._num_likely, guided))) > 1:
            alone.update(guided)
        most = self._most_lines if self.tp.size == 1 else LOGITS_AT_ONCE  # alone, masks need no logits in float32
        parts = [(*part, False) for part in self._split(plain, alone, self._most_lines)]
        for own, at_once in (
            (sorted(masked.difference(guided)), most),
            (sorted(telling), LOGITS_AT_ONCE),
            (sorted(set(others).difference(telling)), self._most_changed),
            (guided, most if masked.issuperset(guided) else LOGITS_AT_ONCE),
        ):
            parts += [(*part, True) for part in self._split(own, alone, at_once)]
        return [
            LogitsProcessorGroup({row: self.wanted[row] for row in part}, needs_float32, at_once, self.device)
            for part, at_once, needs_float32 in parts
        ]

    def _split(self, rows: list[int], alone: set[int], most: int) -> list[tuple[list[int], int]]:
        """Split rows into those that are alone, and parts of at most so many of the others; each with its at_once.

        Rows with log-probabilities of many tokens, or of all, have parts of their own: others do not pay for these.
        """
        together: dict[int, list[int]] = {}
        for row in rows:
            if row not in alone:
                together.setdefault(self._num_likely(row), []).append(row)
        parts = [(own[start : start + most], most) for own in together.values() for start in range(0, len(own), most)]
        return [([row], 1) for row in rows if row in alone] + parts

    def _num_likely(self, row: int) -> int:
        """Return for how many likely tokens a row's group has log-probabilities, at most."""
        return max(FEW, self.wanted[row].params.logprobs or 0)

    def _is_drawn_alone(self, message: LogitsMessage) -> bool:
        """Whether the row is drawn by itself: torch sums for these numbers, and selects for log-probabilities."""
        params = message.params
        has_sums = params.kept_tokens or params.entropy or bool(params.logprobs)
        return self._is_alone or (self._is_deterministic and has_sums)

    def _needs_float32(self, message: LogitsMessage) -> bool:
        """Whether the row needs its logits in float32, to change them or to tell of changed ones."""
        return changes_logits(message) or self._tells_of_changes(message)

    def _tells_of_changes(self, message: LogitsMessage) -> bool:
        """Whether the row's output tells of changed logits, of which torch makes copies then."""
        return message.params.kept_tokens or (self.is_processed and message.params.logprobs is not None)
