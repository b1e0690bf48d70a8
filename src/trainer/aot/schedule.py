"""The compiled program in the order in which a device runs it, and the time that the device waits for transfers.

An optimized module lists the instructions of each computation in the compiler's order (`is_scheduled=true`). The
device runs them one after the other. Each instruction takes the time of its matrix products or of its HBM traffic,
whichever is longer. Three links work in parallel with the device: ICI, DCN and the link to the host. A link serves one
transfer at a time, in the order in which the transfers start. A transfer with separate start and end instructions
overlaps the instructions between the two; at the end instruction, the device waits for the rest of the transfer. Any
other transfer blocks the device until it is complete. The HBM traffic of a transfer, and of an asynchronous copy
between HBM and VMEM, uses the time in which other instructions leave HBM idle.

Start and end instructions have these forms:
  `X-start` and `X-done` for a collective or a copy X.
  `async-start`, `async-update` and `async-done`. The operation is in the computation that these instructions call.
  On a TPU: a fusion that contains the custom call AsyncCollectiveStart, and one that contains AsyncCollectiveDone. The
    fusions in between repeat the collective with the same channel_id.
  `send` and `recv-done` of MegaScale, for transfers between slices of TPUs.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from trainer.aot.collectives import KINDS, SUMS, Collective, executed, layout_of, moved
from trainer.aot.counts import Counter
from trainer.aot.hlo import Computation, Instruction

_TARGET = re.compile(r'custom_call_target="AsyncCollective(Start|Done)"')
_BETWEEN_SLICES = re.compile(r'_xla_megascale_target="\{([\d,]+)\}.*?_xla_megascale_transfer_type="(\w+)"')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')


class Work(NamedTuple):
    """An instruction: the FLOPs of its matrix products by operand dtype, and the bytes that it accesses in HBM."""

    matmul_flops: Mapping[str, float]
    hbm_bytes: float


class Start(NamedTuple):
    """The start of one or more transfers. A `Done` with the same key waits for them. `host_bytes` and `hbm_bytes` are
    the bytes that the transfers access in host memory and in HBM."""

    key: str
    collectives: tuple[Collective, ...]
    host_bytes: float
    hbm_bytes: float


class Done(NamedTuple):
    """The end of transfers. It has no effect without an earlier `Start` with the same key."""

    key: str


class Loop(NamedTuple):
    """A loop. Each of its `times` iterations consists of the events in `body`."""

    times: int
    body: "tuple[Event, ...]"


Event = Work | Start | Done | Loop


def schedule_of(counter: Counter, mesh: Any = None) -> tuple[Event, ...]:
    """Returns the events of one step, from the optimized module of `counter`. For a conditional, includes only the most
    expensive branch, without the branch's collectives, because they may not run in every step. `mesh`: as for
    `aot.collectives.collectives`."""
    return tuple(_Reader(counter, mesh).events(counter.module.entry, False))


class _Reader:
    def __init__(self, counter: Counter, mesh: Any):
        self.counter, self.module, self.layout = counter, counter.module, layout_of(mesh)
        marked = [self._marked(c) for c in self.module.computations.values()]
        self.overlapped = {_channel(i) for found in marked for each in found.values() for i in each}

    def events(self, name: str, conditional: bool) -> Iterator[Event]:
        """Yields the events of the computation `name`. `conditional`: whether the computation is in a branch of a
        conditional."""
        computation = self.module.computations[name]
        for i in computation:
            if i.opcode == "while":
                body = tuple(event for called in i.called for event in self.events(called, conditional))
                yield Loop(self.counter.trips(computation, i), body)
            elif i.opcode == "call":
                yield from self.events(i.called[0], conditional)
            elif i.opcode == "conditional":
                yield from self.events(self.counter.dearest(i), True)
            else:
                events = self._instruction(computation, i)
                yield from (e._replace(collectives=()) if conditional and isinstance(e, Start) else e for e in events)

    def _instruction(self, computation: Computation, i: Instruction) -> Iterator[Event]:
        totals = self.counter.instruction(computation, i)
        inside = self.module.computations[i.called[0]] if i.opcode == "fusion" else None
        marked = self._marked(inside) if inside else {}
        transfers = tuple(self._collectives(computation, i))
        goes_on = i.opcode == "send" or i.opcode.endswith("-start")
        moves = goes_on or bool(transfers) or bool(totals.host_bytes)
        beside = totals.main_bytes if moves and not totals.matmul_flops else 0.0
        for collective in marked.get("Start", []):
            assert inside is not None
            yield Start(_channel(collective), tuple(self._executed(inside, collective)), 0.0, 0.0)
        if totals.matmul_flops or totals.main_bytes > beside:
            yield Work(totals.matmul_flops, totals.main_bytes - beside)
        yield from (Done(_channel(collective)) for collective in marked.get("Done", []))
        if i.opcode.endswith("-done"):
            yield Done(_begun(computation, i))
        if moves:
            key = _rendezvous(i) if i.opcode == "send" else i.name
            yield Start(key, transfers, totals.host_bytes, beside)
            if not goes_on:
                yield Done(key)

    def _collectives(self, computation: Computation, i: Instruction) -> Iterator[Collective]:
        """Yields the collectives of an instruction, except those that start and end in different fusions."""
        if i.opcode.removesuffix("-start") in KINDS:
            yield from self._executed(computation, i)
        elif i.opcode in ("fusion", "fusion-start", "async-start"):
            inside = self.module.computations[i.called[0]]
            for each in inside:
                if i.opcode != "fusion" or _channel(each) not in self.overlapped:
                    yield from self._collectives(inside, each)
        elif i.opcode == "send" and (found := _BETWEEN_SLICES.search(i.text)):
            received = [r for r in computation if r.opcode == "recv" and _rendezvous(r) == _rendezvous(i)]
            arrays = [computation.operands(i)[0].shape, *[r.shape for r in received]]
            size, slices = max(array.bytes for array in arrays), found[1].count(",") + 1
            kind = found[2].lower().replace("_", "-")
            kind = kind if kind in KINDS else "collective-permute"  # the transfer type ONE_TO_ONE
            sent = moved(kind, size, slices)
            yield Collective(kind, kind in SUMS, arrays[0].dtype, (), slices, slices, size, 1, sent, ())

    def _executed(self, computation: Computation, collective: Instruction) -> Iterator[Collective]:
        yield from (each for each in executed(self.layout, computation, collective) if each.devices > 1)

    def _marked(self, computation: Computation) -> dict[str, list[Instruction]]:
        """Returns a dict with two optional keys: "Start" for the collectives that a fusion starts, and "Done" for the
        collectives that it finishes."""
        found: dict[str, list[Instruction]] = {}
        for i in computation:
            if i.opcode == "custom-call" and (mark := _TARGET.search(i.text)):
                found.setdefault(mark[1], []).extend(each for each in computation.operands(i) if each.opcode in KINDS)
        return found


def _channel(collective: Instruction) -> str:
    return f"channel {channel}" if (channel := collective.attribute("channel_id")) else collective.name


def _rendezvous(transfer: Instruction) -> str:
    """Returns the name that a MegaScale `send` and its `recv` share."""
    match = _RENDEZVOUS.search(transfer.text)
    return match[1] if match else transfer.name


def _begun(computation: Computation, done: Instruction) -> str:
    """Returns the key of the transfer that `done` finishes."""
    start = computation.operands(done)[0]
    while start.opcode.endswith("-update"):
        start = computation.operands(start)[0]
    return _rendezvous(start) if start.opcode == "recv" else start.name


class Rates(NamedTuple):
    """The speed of a device.

    Attributes:
      products: a function that returns the seconds of matrix products, given their FLOPs by dtype.
      network: a function that returns the seconds of a collective on ICI and on DCN.
      hbm_bandwidth: bytes per second of HBM.
      host_bandwidth: bytes per second of the link to the host.
    """

    products: Callable[[Mapping[str, float]], float]
    network: Callable[[Collective], tuple[float, float]]
    hbm_bandwidth: float
    host_bandwidth: float


class Times(NamedTuple):
    """Times of a step in seconds. The step takes device + exposed_network + exposed_host.

    Attributes:
      device: the time of the device's instructions and HBM traffic.
      network: the total time of all transfers over the network.
      host: the total time of all transfers between the device and its host.
      exposed_network: the time that the device waits for the network.
      exposed_host: the time that the device waits for transfers from or to its host.
    """

    device: float
    network: float
    host: float
    exposed_network: float
    exposed_host: float


def follow(events: Iterable[Event], rates: Rates) -> Times:
    """Returns the times of a schedule.

    In a loop, the first iteration starts with the links as they are before the loop; every other iteration starts with
    idle links. At the end of each iteration, the device waits for the transfers that the iteration started.
    """
    clock = _Clock(rates)
    clock.run(events)
    waited, busy = clock.waited, clock.busy
    return Times(clock.device, busy["network"], busy["host"], waited["network"], waited["host"])


class _Clock:
    def __init__(self, rates: Rates):
        self.rates = rates
        self.device = 0.0
        self.waited = {"network": 0.0, "host": 0.0}
        self.busy = {"network": 0.0, "host": 0.0}
        self.free = {"ici": 0.0, "dcn": 0.0, "host": 0.0}  # when each link becomes free
        self.behind = 0.0  # seconds of HBM traffic of all transfers started so far
        self.served = 0.0  # the part of `behind` that HBM has served
        self.unused = 0.0  # seconds in which no instruction or transfer used HBM
        # Transfers that have started but not ended: key -> (end time, kind of link, value of `behind` after the start).
        self.ends: dict[str, tuple[float, str, float]] = {}

    @property
    def now(self) -> float:
        return self.device + self.waited["network"] + self.waited["host"]

    def run(self, events: Iterable[Event]) -> None:
        """Follows events, then waits for the transfers that they started."""
        before = list(self.ends)
        for event in events:
            if isinstance(event, Work):
                hbm = event.hbm_bytes / self.rates.hbm_bandwidth
                seconds = max(self.rates.products(event.matmul_flops), hbm)
                self.device += seconds
                self._leave(seconds - hbm)
            elif isinstance(event, Start):
                self._start(event)
            elif isinstance(event, Done):
                self._wait(event.key)
            elif event.times:
                self._repeat(event)
        for key in [key for key in self.ends if key not in before]:
            self._wait(key)

    def _repeat(self, loop: Loop) -> None:
        rest = loop.times
        if max(self.free.values()) > self.now or self.behind > self.served:
            self.run(loop.body)
            rest -= 1
        if rest:
            other = _Clock(self.rates)
            other.run(loop.body)
            self.device += rest * other.device
            self._leave(rest * other.unused)
            for kind in self.busy:
                self.waited[kind] += rest * other.waited[kind]
                self.busy[kind] += rest * other.busy[kind]

    def _start(self, start: Start) -> None:
        self.behind += start.hbm_bytes / self.rates.hbm_bandwidth
        ends = [(0.0, "host")]
        for collective in start.collectives:
            ici, dcn = self.rates.network(collective)
            ends.append((self._serve("dcn", self._serve("ici", self.now, ici), dcn), "network"))
        if start.host_bytes:
            ends.append((self._serve("host", self.now, start.host_bytes / self.rates.host_bandwidth), "host"))
        self.ends[start.key] = (*max(ends), self.behind)

    def _serve(self, link: str, ready: float, seconds: float) -> float:
        """Returns the time at which `link` completes a transfer of `seconds` that can start at the time `ready`.

        A transfer of 0 seconds does not wait for the link.
        """
        if not seconds:
            return ready
        self.busy["host" if link == "host" else "network"] += seconds
        self.free[link] = max(ready, self.free[link]) + seconds
        return self.free[link]

    def _wait(self, key: str) -> None:
        end, kind, behind = self.ends.pop(key, (0.0, "host", 0.0))
        waited = max(0.0, end - self.now)
        self.waited[kind] += waited
        self._leave(waited)
        missing = max(0.0, behind - self.served)
        self.device += missing
        self.served += missing

    def _leave(self, seconds: float) -> None:
        """Lets HBM serve the started transfers for `seconds` in which no instruction uses HBM."""
        used = min(seconds, self.behind - self.served)
        self.served += used
        self.unused += seconds - used
