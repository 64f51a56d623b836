# SPDX-License-Identifier: Apache-2.0
"""Times towers case by case: contenders take turns on one GPU, one at a time."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from chosen_rows import what_is_timed
from contenders import BLOCKS, REFERENCE, Contender, blocks_of
from csv_log import CsvLog, print_row, result_row
from environment import Environment
from failures import Failures
from host_load import watched_load
from remote import close_all
from timing import rounds_within
from tower_cases import NEW_SIZES, Grids
from tower_worker import RemoteTower, build_towers, title_of
from vllm_flashinfer_vit.choices.clock import order_of_turn

# A process whose turn comes is called once unmeasured where one of them takes less.
WARM_UP_BELOW_MS = 20.0
# Even, so that half of them run backwards.
TURNS = 6


@dataclass
class Bench:
    """One run of a benchmark of towers: where rows go, and what is timed."""

    log: CsvLog
    environment: Environment
    failures: Failures
    modes: Sequence[str]
    stock_modes: Sequence[str]
    dtype: str
    budget_s: float
    bench: str = "encoder"

    @contextmanager
    def processes(self, providers: Sequence[str]) -> Iterator[list[RemoteTower]]:
        """Hold the reference's process, the first one, and those that a mode needs."""
        sdpa = Contender.of("stock-torch_sdpa", "fp32")
        contenders = [replace(sdpa, provider=REFERENCE)]
        modes = (*self.modes, *self.stock_modes)
        for blocks in BLOCKS:
            for name in providers:
                contender = Contender.of(name, self.dtype, blocks)
                if any(self.runs(contender, mode) for mode in modes):
                    contenders.append(contender)
        # All at once, and for all models: importing takes longer than measuring.
        remotes = [RemoteTower(contender) for contender in contenders]
        try:
            yield remotes
        finally:
            close_all(remotes)

    def build(
        self, remotes: list[RemoteTower], model: str, depth: int | None
    ) -> tuple[int, list[RemoteTower]]:
        """Build a model's tower in each process.

        Args:
            remotes: Those of `processes`; one that is gone is started anew.
            model: A name or a checkpoint folder.
            depth: Blocks to build; None for all.

        Returns:
            The head dim, and the processes with a tower, the reference's first; none
            without the reference.
        """
        for place, remote in enumerate(remotes):
            if not remote.is_there:
                remotes[place] = RemoteTower(remote.contender)
        built = build_towers(remotes, model, depth, self.failures, model)
        ready, head_dim = [*built], max(built.values(), default=0)
        has_reference = ready and ready[0].contender.provider == REFERENCE
        return head_dim, ready if has_reference else []

    def run_cases(
        self,
        model: str,
        head_dim: int,
        remotes: Sequence[RemoteTower],
        cases: Mapping[str, Grids],
    ) -> None:
        """Time towers of `build` on every case."""
        if not remotes:
            return
        reference, *others = remotes
        for case, grids in cases.items():
            print(f"{model} {case}", flush=True)
            with (
                self.failures.noted(f"{model} {case} {REFERENCE}"),
                tempfile.TemporaryDirectory() as folder,
            ):
                path = str(Path(folder, "reference.safetensors"))
                reference.call("load", grids, None)
                flops = reference.call("write_reference", path)
                self._run_case(model, case, grids, others, path, flops, head_dim)

    def _run_case(
        self,
        model: str,
        case: str,
        grids: Grids,
        remotes: Sequence[RemoteTower],
        reference: str,
        flops: float,
        head_dim: int,
    ) -> None:
        loaded = []
        for remote in remotes:
            with self.failures.noted(f"{model} {case} {title_of(remote)}"):
                if kernels := remote.call("load", grids, reference):
                    print(f"  {title_of(remote)} runs {kernels}")
                loaded.append(remote)
        rows = []
        for mode in dict.fromkeys((*self.stock_modes, *self.modes)):
            errors: dict[RemoteTower, float] = {}
            for remote in loaded:
                if self.runs(remote.contender, mode):
                    with self.failures.noted(
                        f"{model} {case} {title_of(remote)} {mode}"
                    ):
                        errors[remote] = remote.call("check", mode)
            with self.failures.noted(f"{model} {case} {mode}"):
                # A replay does not wait for the host.
                watched = errors and what_is_timed(mode) != "graph"
                with watched_load() if watched else nullcontext():
                    samples = self._take_turns(list(errors), mode)
                for remote, taken in samples.items():
                    row = result_row(
                        self.environment,
                        bench=self.bench,
                        case=case,
                        provider=remote.contender.provider,
                        model=model,
                        head_dim=head_dim,
                        dtype=self.dtype,
                        mode=mode,
                        samples_ms=taken,
                        flops=0 if what_is_timed(mode) in ("host", "new") else flops,
                        rel_err=errors[remote],
                    )
                    rows.append(row)
                    print_row(row)
        # All of a case or none: where a run ends within it, nothing is compared with
        # less than stock's best, or with what an earlier run of the command has left.
        for row in rows:
            self.log.add(row)

    def runs(self, contender: Contender, mode: str) -> bool:
        """Whether a contender is to be timed in a mode."""
        is_wanted = mode in self.modes or (
            contender.is_stock and mode in self.stock_modes
        )
        return is_wanted and contender.blocks == blocks_of(mode)

    def _take_turns(
        self, remotes: Sequence[RemoteTower], mode: str
    ) -> dict[RemoteTower, list[float]]:
        samples: dict[RemoteTower, list[float]] = {remote: [] for remote in remotes}
        if not remotes:
            return samples
        slow_ms = {r: r.call("sample", mode, 1, True)[0] for r in remotes}
        rounds = rounds_within(sum(slow_ms.values()), self.budget_s, TURNS, 50)
        if what_is_timed(mode) == "new":
            # The same sizes in all such modes: the first one is `slow_ms`.
            rounds = NEW_SIZES - 1
        # All of them or none: by its own time, a slow one alone would begin cold.
        warm_up = min(slow_ms.values()) < WARM_UP_BELOW_MS
        for turn in range(TURNS):
            count = len(range(turn, rounds, TURNS))
            for remote in order_of_turn(remotes, turn):
                samples[remote] += remote.call("sample", mode, count, warm_up)
        return samples
