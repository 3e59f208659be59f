"""The gateway's metrics. Each family is defined in docs/operations.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from protocol.compute_use import ComputeUse
from protocol.connectors import Traffic
from protocol.device_bytes import DeviceBytes
from sessions.actions import NotFresh, TurnMeasured
from sessions.lifecycle import State

# When a series began is no family of ours.
disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY_S = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)
_OPEN_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
_RTF = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0)
_ENCODE_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25)
_CONTROL_S = (0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.125, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)
_LAG_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)


class Queue(Protocol):
    """Anything whose fill can be asked for when metrics are read."""

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait in it."""


class FrameCounts:
    """Frames of one surface: plain integers, because they are counted on the hot path."""

    def __init__(self) -> None:
        self.received = 0
        self.sent = 0


class GatewayMetrics:
    """Everything that one gateway process counts, in a registry of its own.

    `pipelines` are those that it serves: what each has no session of yet is there, and zero.
    """

    def __init__(self, pipelines: Iterable[str] = ()) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self._sessions = Gauge(
            "antiphon_sessions", "Sessions by state.", ["pipeline", "state"], registry=registry
        )
        for pipeline in pipelines:
            for state in State:
                if state is not State.CLOSED:
                    self._sessions.labels(pipeline, state.value)
        self._opened = Counter(
            "antiphon_sessions_opened", "Sessions opened.", ["pipeline"], registry=registry
        )
        self._open_s = Histogram(
            "antiphon_open_seconds",
            "From the request for a session until it was open, waiting for a place included.",
            ["pipeline"],
            buckets=_OPEN_S,
            registry=registry,
        )
        self._closed = Counter(
            "antiphon_sessions_closed",
            "Sessions closed, by reason.",
            ["pipeline", "reason"],
            registry=registry,
        )
        self._refused = Counter(
            "antiphon_opens_refused",
            "Connections and opens refused, by reason.",
            ["reason"],
            registry=registry,
        )
        self._attached = Counter(
            "antiphon_attaches",
            "Clients that came to a session that was open, by role, or by the code of refusal.",
            ["pipeline", "result"],
            registry=registry,
        )
        self._turns = Counter(
            "antiphon_turns", "Turns ended, by status.", ["pipeline", "status"], registry=registry
        )
        # Of each series what counts it: looking it up costs more than counting.
        self._turns_ended: dict[tuple[str, str], Counter] = {}
        self._not_computed: dict[str, Counter] = {}
        self._ttft = Histogram(
            "antiphon_server_ttft_seconds",
            "End of the user's turn to first text, taken at the server.",
            ["pipeline"],
            buckets=_LATENCY_S,
            registry=registry,
        )
        self._ttfp = Histogram(
            "antiphon_server_ttfp_seconds",
            "End of the user's turn to first audio, taken at the server.",
            ["pipeline"],
            buckets=_LATENCY_S,
            registry=registry,
        )
        self._rtf = Histogram(
            "antiphon_server_rtf",
            "Time to synthesise over duration of the audio, per turn, taken at the server.",
            ["pipeline"],
            buckets=_RTF,
            registry=registry,
        )
        self._errors = Counter(
            "antiphon_errors", "Errors told to clients, by code.", ["code"], registry=registry
        )
        self._superseded = Counter(
            "antiphon_observations_superseded",
            "Observations answered with a newer one's actions, and not computed.",
            ["pipeline"],
            registry=registry,
        )
        self._not_fresh = Counter(
            "antiphon_safe_answers",
            "Observations answered with the safe action, or without one with an error, by reason.",
            ["pipeline", "reason", "answer"],
            registry=registry,
        )
        self._missed = Counter(
            "antiphon_deadlines_missed",
            "Observations that had no fresh answer within their deadline.",
            ["pipeline"],
            registry=registry,
        )
        self._stops = Counter(
            "antiphon_emergency_stops",
            "Sessions that were stopped, by whom.",
            ["pipeline", "by"],
            registry=registry,
        )
        self._pictures = Counter(
            "antiphon_world_pictures",
            "Pictures of worlds that were sent to viewers, or left out for who reads slowly.",
            ["pipeline", "result"],
            registry=registry,
        )
        self._encoded = Histogram(
            "antiphon_picture_encode_seconds",
            "What a thread took to encode a picture.",
            ["format"],
            buckets=_ENCODE_S,
            registry=registry,
        )
        self._controlled = Histogram(
            "antiphon_world_control_seconds",
            "From a player's hold until the first picture in which it took effect was sent.",
            ["pipeline"],
            buckets=_CONTROL_S,
            registry=registry,
        )
        self._late = Counter(
            "antiphon_world_late_steps",
            "Steps of worlds that go on by themselves, begun a whole period after they were due.",
            ["pipeline"],
            registry=registry,
        )
        self._worker_up = Gauge(
            "antiphon_worker_up",
            "1 while the gateway has a link to the worker.",
            ["stage", "worker"],
            registry=registry,
        )
        self._worker_restarts = Counter(
            "antiphon_worker_restarts",
            "Times that a new incarnation of a worker replaced a known one.",
            ["stage", "worker"],
            registry=registry,
        )
        self._lag = Histogram(
            "antiphon_loop_lag_seconds",
            "How long a callback that is due waits for the event loop.",
            buckets=_LAG_S,
            registry=registry,
        )
        self._egresses: set[Queue] = set()
        self._links: dict[str, Callable[[], int]] = {}
        self._devices: dict[tuple[str, str], Callable[[], Mapping[str, DeviceBytes]]] = {}
        self._computes: dict[tuple[str, str], Callable[[], ComputeUse]] = {}
        self._counters: dict[tuple[str, str], Callable[[], Mapping[str, int]]] = {}
        self._frames: dict[str, FrameCounts] = {}
        self._traffic: Callable[[], Mapping[tuple[str, str], Traffic]] = dict
        self._waiting: Callable[[], Mapping[str, int]] = dict
        registry.register(_AtRead(self._read))

    # Sessions and turns, told by the session host

    def session_state_changed(
        self, pipeline: str, before: State | None, after: State | None
    ) -> None:
        """A session moved; None: it did not exist before, or does not any more."""
        if before is not None:
            self._sessions.labels(pipeline, before.value).dec()
        if after is not None:
            self._sessions.labels(pipeline, after.value).inc()

    def session_opened(self, pipeline: str, after_s: float) -> None:
        """A session became active, so long after it was asked for."""
        self._opened.labels(pipeline).inc()
        self._open_s.labels(pipeline).observe(after_s)

    def session_closed(self, pipeline: str, reason: str) -> None:
        """A session that had been active ended."""
        self._closed.labels(pipeline, reason).inc()

    def open_refused(self, reason: str) -> None:
        """A connection or an open was refused; `reason` is an error code."""
        self._refused.labels(reason).inc()

    def attach_ended(self, pipeline: str, result: str) -> None:
        """A client came to an open session; `result` is its role, or why it was refused."""
        self._attached.labels(pipeline, result).inc()

    def turn_finished(self, pipeline: str, turn: TurnMeasured) -> None:
        """A turn ended."""
        counted = self._turns_ended.get((pipeline, turn.status))
        if counted is None:
            counted = self._turns.labels(pipeline, turn.status)
            self._turns_ended[pipeline, turn.status] = counted
        counted.inc()
        if turn.ttft_ms is not None:
            self._ttft.labels(pipeline).observe(turn.ttft_ms / 1000)
        if turn.ttfp_ms is not None:
            self._ttfp.labels(pipeline).observe(turn.ttfp_ms / 1000)
        if turn.rtf is not None:
            self._rtf.labels(pipeline).observe(turn.rtf)

    # Workers and links, told by the session host

    def worker_state_changed(self, stage: str, worker: str, up: bool) -> None:
        """A worker can be talked to, or cannot."""
        self._worker_up.labels(stage, worker).set(1 if up else 0)
        self._worker_restarts.labels(stage, worker)

    def worker_restarted(self, stage: str, worker: str) -> None:
        """A new incarnation took the place of a worker that was known."""
        self._worker_restarts.labels(stage, worker).inc()

    def watch_edges(self, traffic: Callable[[], Mapping[tuple[str, str], Traffic]]) -> None:
        """`traffic()` is what has gone over each (edge, connector)."""
        self._traffic = traffic

    def watch_waiting(self, waiting: Callable[[], Mapping[str, int]]) -> None:
        """`waiting()` is how many opens of each pipeline are not sessions yet."""
        self._waiting = waiting

    def watch_link(self, worker: str, depth: Callable[[], int]) -> None:
        """`depth()` is how many messages to `worker` are not acknowledged."""
        self._links[worker] = depth

    def watch_devices(
        self, stage: str, worker: str, devices: Callable[[], Mapping[str, DeviceBytes]]
    ) -> None:
        """`devices()` is what the worker has reserved, as of its last heartbeat."""
        self._devices[stage, worker] = devices

    def watch_compute(self, stage: str, worker: str, compute: Callable[[], ComputeUse]) -> None:
        """`compute()` is what the worker takes of the processor, as of its last heartbeat."""
        self._computes[stage, worker] = compute

    def watch_counters(
        self, stage: str, worker: str, counters: Callable[[], Mapping[str, int]]
    ) -> None:
        """`counters()` is what the worker's engine has done, as of its last heartbeat."""
        self._counters[stage, worker] = counters

    # Connections, told by surfaces

    def error_told(self, code: str) -> None:
        """A client was told of an error."""
        self._errors.labels(code).inc()

    def observations_superseded(self, pipeline: str, count: int) -> None:
        """So many observations were not computed, because a newer one had come."""
        counted = self._not_computed.get(pipeline)
        if counted is None:
            counted = self._not_computed[pipeline] = self._superseded.labels(pipeline)
        counted.inc(count)

    def not_fresh(self, pipeline: str, answered: NotFresh) -> None:
        """An observation was answered without anything fresh."""
        answer = "safe_action" if answered.safe else "error"
        self._not_fresh.labels(pipeline, answered.reason, answer).inc()
        if answered.late:
            self._missed.labels(pipeline).inc()

    def stopped(self, pipeline: str, by: str) -> None:
        """A session was stopped."""
        self._stops.labels(pipeline, by).inc()

    def picture_sent(self, pipeline: str, control_s: float | None) -> None:
        """A viewer was sent a picture; the first of a hold came so long after that."""
        self._pictures.labels(pipeline, "sent").inc()
        if control_s is not None:
            self._controlled.labels(pipeline).observe(control_s)

    def picture_dropped(self, pipeline: str) -> None:
        """A picture was left out for a viewer that reads slowly."""
        self._pictures.labels(pipeline, "dropped").inc()

    def picture_encoded(self, format: str, seconds: float) -> None:
        """A thread has encoded a picture."""
        self._encoded.labels(format).observe(seconds)

    def steps_late(self, pipeline: str, count: int) -> None:
        """So many steps of a world were begun a whole period late."""
        if count:
            self._late.labels(pipeline).inc(count)

    def watch_egress(self, queue: Queue) -> None:
        """Count `queue` in the egress depth until `forget_egress`."""
        self._egresses.add(queue)

    def forget_egress(self, queue: Queue) -> None:
        """The connection of `queue` is gone."""
        self._egresses.discard(queue)

    def frames(self, surface: str) -> FrameCounts:
        """The frame counts of a surface."""
        return self._frames.setdefault(surface, FrameCounts())

    def loop_lag(self, seconds: float) -> None:
        """A callback that was due waited this long."""
        self._lag.observe(seconds)

    def render(self) -> bytes:
        """All families in Prometheus' text format."""
        return generate_latest(self.registry)

    def _read(self) -> Iterator[Metric]:
        depths = [queue.queued_bytes for queue in self._egresses]
        yield GaugeMetricFamily(
            "antiphon_connections", "Open client connections.", value=len(depths)
        )
        yield GaugeMetricFamily(
            "antiphon_egress_queue_bytes",
            "Bytes that wait to be sent to clients, in all.",
            value=sum(depths),
        )
        yield GaugeMetricFamily(
            "antiphon_egress_queue_bytes_max",
            "Bytes that wait in the fullest client queue.",
            value=max(depths, default=0),
        )
        waiting = GaugeMetricFamily(
            "antiphon_opens_waiting",
            "Opens that are not sessions yet: they wait for a place, or for a worker's answer.",
            labels=["pipeline"],
        )
        for pipeline, count in self._waiting().items():
            waiting.add_metric([pipeline], count)
        yield waiting
        links = GaugeMetricFamily(
            "antiphon_link_queue_messages",
            "Messages to a worker that it has not acknowledged.",
            labels=["worker"],
        )
        for worker, depth in self._links.items():
            links.add_metric([worker], depth())
        yield links
        yield from self._device_families()
        yield from self._compute_families()
        engine = CounterMetricFamily(
            "antiphon_engine",
            "What a worker's engine has done, by its own names.",
            labels=["stage", "worker", "counter"],
        )
        for labels, counters in self._counters.items():
            for name, count in counters().items():
                engine.add_metric([*labels, name], count)
        yield engine
        edge_bytes = CounterMetricFamily(
            "antiphon_edge_bytes",
            "Payload bytes that crossed an edge, by connector.",
            labels=["edge", "connector"],
        )
        edge_payloads = CounterMetricFamily(
            "antiphon_edge_payloads",
            "Payloads that crossed an edge, by connector.",
            labels=["edge", "connector"],
        )
        for (edge, connector), passed in self._traffic().items():
            edge_bytes.add_metric([edge, connector], passed.bytes)
            edge_payloads.add_metric([edge, connector], passed.payloads)
        yield edge_bytes
        yield edge_payloads
        frames = CounterMetricFamily(
            "antiphon_frames", "Frames of client connections.", labels=["surface", "direction"]
        )
        for surface, counts in self._frames.items():
            frames.add_metric([surface, "received"], counts.received)
            frames.add_metric([surface, "sent"], counts.sent)
        yield frames

    def _device_families(self) -> Iterator[Metric]:
        device = ["stage", "worker", "device"]
        budget = GaugeMetricFamily(
            "antiphon_device_budget_bytes",
            "Bytes of a device that a worker may reserve.",
            labels=device,
        )
        reserved = GaugeMetricFamily(
            "antiphon_device_reserved_bytes",
            "Bytes of a device that a worker has reserved, by account.",
            labels=[*device, "account"],
        )
        undeclared = GaugeMetricFamily(
            "antiphon_device_undeclared_bytes",
            "Bytes that sessions were measured to hold beyond what their engine declared.",
            labels=device,
        )
        for (stage, worker), devices in self._devices.items():
            for name, held in devices().items():
                labels = [stage, worker, name]
                if held.budget is not None:
                    budget.add_metric(labels, held.budget)
                for account, size in held.accounts().items():
                    reserved.add_metric([*labels, account], size)
                undeclared.add_metric(labels, held.undeclared)
        yield from (budget, reserved, undeclared)

    def _compute_families(self) -> Iterator[Metric]:
        worker = ["stage", "worker"]
        cores = GaugeMetricFamily(
            "antiphon_worker_cores",
            "Cores of the processor that the sessions of a worker can count on.",
            labels=worker,
        )
        used = GaugeMetricFamily(
            "antiphon_worker_used_cores", "Cores that a worker uses.", labels=worker
        )
        session = GaugeMetricFamily(
            "antiphon_worker_session_cores",
            "What a session of a worker takes of a core on average.",
            labels=worker,
        )
        for labels, compute in self._computes.items():
            use = compute()
            if use.cores is not None:
                cores.add_metric(labels, use.cores)
            used.add_metric(labels, use.used)
            session.add_metric(labels, use.session)
        yield from (cores, used, session)


class _AtRead:
    """A collector of values that are asked for when metrics are read."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()
