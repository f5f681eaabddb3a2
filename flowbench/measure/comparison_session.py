"""The sitting of a comparison: base, head, the canary and the reference alive together, in rounds until it is known enough."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from flowbench.cell import Case, Cell
from flowbench.judge.compare import comparison_of, is_case_precise, matched_sides, to_confirm
from flowbench.measure.disturbance import SLEPT_S, Counters, read_counters, slept_s
from flowbench.measure.schedule import Turn
from flowbench.measure.session import CAPPED, SLEPT, Session, Watcher, given_up
from flowbench.measure.wire import Job
from flowbench.record.run import Finding, RunDocument
from flowbench.record.sample import Sample

# The reference's speed need not be known as finely as a change: it takes part in so many rounds of each case only. Of fewer
# the interval of a relative speed would say nothing.
REFERENCE_ROUNDS = 3

# Rounds that confirm may take so much more than the wall cap of the sampling.
CONFIRMING_SHARE = 0.25

# How often a round that the machine slept through is measured anew.
_MOST_SLEEPS = 3


def takes_part(document: RunDocument, cell: Cell, pair: int) -> bool:
    """Whether a round has the cell: the reference is in the first ones alone, the canary in none that confirm."""
    if cell.engine == document.reference:
        return pair < REFERENCE_ROUNDS
    confirms = pair >= document.protocol.pairs - comparison_of(document).confirmation_pairs
    return not (confirms and document.engine(cell.engine).side == "canary")


@dataclass(frozen=True)
class Place:
    """Where the ranks of a side import their framework from, and by which fraction their steps are made slower."""

    import_path: str | None = None
    slowdown: float = 0.0


def run_comparison(
    path: Path,
    document: RunDocument,
    places: Mapping[str, Place],
    watcher: Watcher,
    found: RunDocument | None = None,
) -> RunDocument:
    """Measure the sitting planned in `document`, kept at `path`; `places` has one per side. Returns it with its ending.

    KeyboardInterrupt passes through after all processes are gone and the document says how far it came. `found` is what
    `path` held when `document` was made from it, to be gone on with.
    """
    return ComparisonSession(path, document, places, watcher).carry_out(found)


class ComparisonSession(Session):
    """Rounds over all open cases: a case is closed when its intervals are narrow, its sides have failed, or time is up."""

    def __init__(
        self,
        path: Path,
        document: RunDocument,
        places: Mapping[str, Place],
        watcher: Watcher,
        counters: Callable[[], Counters] = read_counters,
    ) -> None:
        super().__init__(path, document, watcher)
        self._places, self._clocks = places, counters
        # Of a sitting that is gone on with: its rounds so far, and their time, which the wall cap counts too.
        spent_s = {self._round_of(sample): sample.wall_s for sample in document.samples}
        self._rounds, self._began = len(spent_s), self._began - sum(spent_s.values())
        self._judged_sides = [side for side in places if side not in ("base", "canary")]
        self._cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []

    def run(self) -> None:
        """Sample, then confirm, then write the ending; what the document has already is not measured again."""
        plan, protocol = comparison_of(self.document), self.document.protocol
        sampling, cap_s = protocol.pairs - plan.confirmation_pairs, protocol.wall_cap_s
        done = set(map(self._round_of, self.document.samples))
        for case in self._open_cases():
            if any(measured == case for measured, _ in done):
                self._close_where_done(case, sum(measured == case for measured, _ in done))
        for pair in range(sampling):
            self._make_room(pair, done)
            for case in self._open_cases():
                if (case, pair) in done:
                    continue
                if self.over_wall_cap():
                    self._close_capped(Counter(measured for measured, number in done if number < sampling), sampling)
                    break
                done.add((case, pair))
                later = [(other, number) for number in range(pair, sampling) for other in self._open_cases()]
                self._round(case, pair, later=[one for one in later if one not in done])
                self._close_where_done(case, pair + 1)
        for case in self._open_cases():
            self._close(case, f"all {sampling} pairs were measured, and the interval is still wider than wanted")
        in_question = to_confirm(self.document, self._judged_sides)
        confirming = [(case, pair) for pair in range(sampling, protocol.pairs) for case in in_question]
        confirming = [one for one in confirming if one not in done]
        reason = self._capped()
        for index, (case, pair) in enumerate(confirming):
            if not self._has_both_sides(case, in_question[case]):
                continue
            if self.over_wall_cap(1 + CONFIRMING_SHARE):
                reason = f"{CAPPED} {cap_s:g} s was reached, and a quarter more, before all new pairs were measured"
                break
            self._round(case, pair, ("base", *in_question[case]), confirming[index + 1 :])
        self.finish("wall_cap" if reason else "complete", reason)

    def closed(self, case: Case) -> str | None:
        return comparison_of(self.document).stopped.get(case.key)

    def job(self, turn: Turn) -> Job:
        side = self.document.engine(turn.cell.engine).side
        place = self._places[side] if side else Place()
        return replace(
            super().job(turn),
            steps_per_turn=self.document.protocol.steps_per_turn,
            untimed_per_turn=self.document.protocol.untimed_per_turn,
            import_path=place.import_path,
            slowdown=place.slowdown,
            cores=cores_of(turn.cell.case, turn.pair, self._cores),
        )

    def _round(self, case: Case, pair: int, sides: Sequence[str] = (), later: Sequence[tuple[Case, int]] = ()) -> None:
        """One fresh process group of each cell of `case` (or of `sides`), in an order that is reversed from round to round.

        `later` are the rounds that may follow, of cases and pairs: for whoever watches; those that are sure may start ahead.
        """
        turns = self._turns(case, pair, sides)
        self._rounds += 1
        left = [*turns, *(turn for one in later for turn in self._turns(*one, sides))]
        self._watcher.turn(turns[0], self._rounds, self._rounds + len(later), self._left_s(left))
        for _ in range(_MOST_SLEEPS):
            kept, before = self.document, self._clocks()
            self.measure(turns, [self._turns(*one, sides) for one in later if self._is_sure(pair, one[1])])
            slept = slept_s(before, self._clocks())
            if slept <= SLEPT_S:
                return
            message = f"the machine slept for {slept:.0f} s in round {pair + 1}, which was measured anew"
            self.write(
                samples=kept.samples,
                findings=(*kept.findings, Finding("sleep", message, turns[0].cell.key, pair)),
            )
        self._close(case, f"{SLEPT} round {pair + 1} {_MOST_SLEEPS} times")

    def _turns(self, case: Case, pair: int, sides: Sequence[str]) -> list[Turn]:
        cells = [cell for cell in self.document.cells_of(case) if self._takes_part(cell, pair)]
        cells = [cell for cell in cells if not sides or self.document.engine(cell.engine).side in sides]
        order = cells if pair % 2 == 0 else cells[::-1]
        return [Turn(cell, pair, position) for position, cell in enumerate(order)]

    def _make_room(self, pair: int, done: Set[tuple[Case, int]]) -> None:
        """Close cases, those of the longest rounds first, where the cap has no time for the least pairs of all: for the others.

        How long a round takes is known after the first without the reference. The time in which processes started ahead is
        everyone's, whosever round it was.
        """
        least, cap_s = comparison_of(self.document).least_pairs, self.document.protocol.wall_cap_s
        if pair not in range(REFERENCE_ROUNDS + 1, least):
            return
        last_rounds = {self._round_of(sample)[0]: sample for sample in self.document.samples}
        starting_s = {case: self._starting_s.get((case, sample.pair), 0.0) for case, sample in last_rounds.items()}
        shared_s = sum(starting_s.values()) / max(1, len(starting_s))
        last_round_s = {case: one.wall_s - starting_s[case] + shared_s for case, one in last_rounds.items()}
        open_cases = sorted(self._open_cases(), key=lambda case: last_round_s.get(case, 0.0))
        while len(open_cases) > 1:
            missing = [case for case in open_cases for number in range(pair, least) if (case, number) not in done]
            needed_s = sum(last_round_s.get(case, 0.0) for case in missing)
            if needed_s <= self.cap_left_s():
                return
            case = open_cases.pop()
            self._close(
                case,
                f"{CAPPED} {cap_s:g} s leaves no time for {least} rounds of all cases, and this one's take the longest:"
                f" {last_round_s.get(case, 0.0):.1f} s",
            )

    def _close_capped(self, rounds: Mapping[Case, int], sampling: int) -> None:
        """Close what has not all its rounds when time is up."""
        for case in self._open_cases():
            if rounds[case] < sampling:
                self._close(
                    case,
                    f"{CAPPED} {self.document.protocol.wall_cap_s:g} s was reached after {rounds[case]} of {sampling} rounds",
                )

    def _capped(self) -> str | None:
        """What the cap kept from being measured; None where nothing was."""
        cap_s = self.document.protocol.wall_cap_s
        capped = [why for why in comparison_of(self.document).stopped.values() if why.startswith(CAPPED)]
        if any("was reached" in why for why in capped):
            return f"{CAPPED} {cap_s:g} s was reached"
        if capped:
            return f"{CAPPED} {cap_s:g} s left no time for the least rounds of {len(capped)} of the cases"
        return None

    def _is_sure(self, pair: int, later: int) -> bool:
        """Whether no narrow interval that is found in the rounds of `pair` makes one of the pair `later` needless."""
        plan = comparison_of(self.document)
        confirms = later >= self.document.protocol.pairs - plan.confirmation_pairs
        return later < max(plan.least_pairs, pair + 1) or confirms

    def _round_of(self, sample: Sample) -> tuple[Case, int]:
        return self.document.by_key[sample.cell].case, sample.pair

    def _takes_part(self, cell: Cell, pair: int) -> bool:
        return cell.key not in given_up(self.document.samples) and takes_part(self.document, cell, pair)

    def _open_cases(self) -> list[Case]:
        stopped = comparison_of(self.document).stopped
        return [case for case in self.document.cases if case.key not in stopped]

    def _close_where_done(self, case: Case, pairs: int) -> None:
        if not self._has_both_sides(case, ("head",)):
            self._close(case, f"a side failed or is void after {pairs} rounds")
        elif is_case_precise(self.document, case):
            self._close(case, f"the intervals were narrow enough after {pairs} pairs")

    def _has_both_sides(self, case: Case, sides: Sequence[str]) -> bool:
        """Whether base, and one of `sides` beside it, has neither failed nor is void, of any engine at `case`."""
        lost = given_up(self.document.samples)
        return any(
            match.case == case and not lost & {cell.key for cell in (match.base, match.head) if cell is not None}
            for side in sides
            for match in matched_sides(self.document, "base", side)
        )

    def _close(self, case: Case, why: str) -> None:
        plan = comparison_of(self.document)
        self.write(comparison=replace(plan, stopped={**plan.stopped, case.key: why}))


def cores_of(case: Case, pair: int, usable: list[int]) -> tuple[int, ...]:
    """The cores that all sides of a round share, others from round to round; empty (all) where a case needs them all.

    One side alone may sit beside a busy neighbour for as long as it lives: on the same cores they all do. Where a GPU computes,
    a rank has one, for the thread that feeds it: as fast as its core is, a step of little arithmetic is done.
    """
    needed = case.world_size * (case.threads if case.device == "cpu" else 1)
    if needed >= len(usable):
        return ()
    first = pair * needed % len(usable)
    return tuple(sorted((usable + usable)[first : first + needed]))
