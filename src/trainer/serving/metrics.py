"""The server's Prometheus metrics, which clients read at the path /metrics."""

from typing import Any

import prometheus_client as prometheus

from trainer.inference.scheduler import Scheduler

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """A server's metrics. Each instance has a separate Prometheus registry."""

    def __init__(self, scheduler: Scheduler):
        self._scheduler, self._registry = scheduler, prometheus.CollectorRegistry()
        slots = scheduler.engine.max_concurrent_decodes
        self._gauge("trainer_waiting_prompts", "Prompts waiting for a slot", lambda: scheduler.waiting)
        self._gauge("trainer_slots", "Slots for sequences", lambda: slots)
        self._gauge("trainer_slots_in_use", "Slots that hold a sequence", lambda: slots - scheduler.free_slots)
        self.requests = self._made(prometheus.Counter, "trainer_requests", "Requests", labelnames=("path", "code"))
        self.generated = self._made(prometheus.Counter, "trainer_generated_tokens", "Tokens generated")
        self._prefilled = self._made(
            prometheus.Counter, "trainer_prefilled_tokens", "Prompt tokens processed by the model"
        )
        self._reused = self._made(
            prometheus.Counter, "trainer_prefix_hit_tokens", "Prompt tokens taken from cached prefixes"
        )
        said = "Time from a request to its first token"
        self.first = self._made(prometheus.Histogram, "trainer_time_to_first_token_seconds", said, buckets=_SECONDS)
        said = "Time between consecutive tokens of a sequence"
        self.between = self._made(prometheus.Histogram, "trainer_time_between_tokens_seconds", said, buckets=_SECONDS)
        self._counted = {self._prefilled: 0, self._reused: 0}

    def text(self) -> bytes:
        """Returns the metrics in Prometheus' text format."""
        totals = {self._prefilled: self._scheduler.prefilled, self._reused: self._scheduler.reused}
        for counter, total in totals.items():
            counter.inc(max(total - self._counted[counter], 0))
        self._counted = totals
        return prometheus.generate_latest(self._registry)

    content_type = prometheus.CONTENT_TYPE_LATEST

    def _made(self, kind: Any, name: str, said: str, **how: Any) -> Any:
        return kind(name, said, registry=self._registry, **how)

    def _gauge(self, name: str, said: str, value: Any) -> None:
        self._made(prometheus.Gauge, name, said).set_function(value)
