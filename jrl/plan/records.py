"""The records of a plan: a compiled program on one chip, and a run on a topology."""

from __future__ import annotations

from typing import NamedTuple

from jrl.plan.topology import Topology


class Program(NamedTuple):
    """One compiled program on one chip.

    Attributes:
      bytes_per_chip: of the chip's memory while it runs, by part; "total" is the sum. "prepared"
        is the sampler's own copy of the weights. Parts that cannot be separated are absent.
      fits: whether the total is within the chip's memory.
      flops: operations of a chip; None, as the next four, where XLA ran out of memory.
      hbm_bytes: moved between memory and the chip's units.
      collective_bytes: bytes that a chip sends, by kind and mesh axes, such as "all-gather/fsdp".
      roofline_seconds: the least time on chips with these figures; of a sampler with its cache read
        as far as it is filled.
      bound: the parts of that time limited by "compute", "memory" and "network", seconds each.
      compile_seconds: of compiling, on this machine.
      layers: of the two shallower programs that the numbers are extrapolated from; empty where
        they are of the run's own program.
      alone: seconds that "compute", "memory" and "network" each would take by themselves.
      full_seconds: the sampler's ``roofline_seconds`` if its cache were read whole for every token;
        None where it is, because no kernel reads what is filled alone.
      floor_seconds: the time of the work that cannot be avoided; see ``useful.floor_seconds``.
      model_flops: model FLOPs of a chip; see ``useful.model_flops``.
      reads: bytes of the sampler's memory traffic that are "weights" and "cache".
      effort: XLA's, with which it was compiled.
      operations: seconds that the operations of each kind would take by themselves; see
        ``costs.KINDS``. What is sent counts with the network's time.
      counted: whether nothing was compiled, and temporaries and times are estimates.
      kernels: on GPUs, of one token step of a sampler or a whole training step, launches in the
        "layers", the "draw" and the "rest", "conditionals", "returns" to the host, "bytes" of
        memory traffic, and those "copied" by operations that only move arrays (``plan.kernels``).
    """

    bytes_per_chip: dict[str, float]
    fits: bool
    flops: float | None
    hbm_bytes: float | None
    collective_bytes: dict[str, float] | None
    roofline_seconds: float | None
    bound: dict[str, float] | None
    compile_seconds: float
    layers: tuple[int, ...] = ()
    alone: dict[str, float] | None = None
    full_seconds: float | None = None
    floor_seconds: float | None = None
    model_flops: float | None = None
    reads: dict[str, float] | None = None
    effort: float = 0.0
    operations: dict[str, float] | None = None
    counted: bool = False
    kernels: dict[str, float] | None = None


class Plan(NamedTuple):
    """A run on a topology.

    Attributes:
      topology: the slices.
      mesh: devices along each axis.
      programs: "resharding" (where the sampler has a mesh of its own), "sampler" (absent where the
        method samples nothing) and "train_step"; and "judge", the memory while a judge on the
        devices is asked.
      fits: whether all programs fit.
      remedies: changes that would make it fit; empty when it does.
      parameters: of the policy.
      tokens: the most completion tokens of a step.
      rollout_mesh: of the sampler's own devices; None where it shares those of training.
      move_seconds: of the transfer of the weights to those devices.
      sampling_mesh: of the sampler on the devices of training; None where it has the same.
      experts: routed experts of a layer; 0 for none.
      remat: ``model.remat``; what would be chosen where that is "auto".
      layers: of the policy.
    """

    topology: Topology
    mesh: dict[str, int]
    programs: dict[str, Program]
    fits: bool
    remedies: list[str]
    parameters: int
    tokens: int
    rollout_mesh: dict[str, int] | None = None
    move_seconds: float = 0.0
    sampling_mesh: dict[str, int] | None = None
    experts: int = 0
    remat: str = "elementwise"
    layers: int = 0

    @property
    def step_seconds(self) -> float | None:
        """The programs in turn, or in parallel on disjoint devices; None if one is unknown.

        How long judges take is not known.
        """
        timed = (p for name, p in self.programs.items() if name != "judge")
        times = [p.roofline_seconds for p in timed]
        together = sum if self.rollout_mesh is None else max
        times_known = [t for t in times if t is not None]
        return None if None in times else float(together(times_known)) + self.move_seconds
