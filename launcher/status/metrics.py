"""`horovodish run --metrics-port`: what `horovodish status` knows of a job, as Prometheus reads it."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from horovodish.errors import LaunchError
from horovodish.launcher.status.jobs import ask
from horovodish.launcher.status.links import sent_by


@contextlib.contextmanager
def served(address: tuple[str, int]) -> Iterator[None]:
    """Within the block, answers HTTP requests at an address and a port. Each one asks the ranks.

    Raises:
        LaunchError: prometheus-client is not installed, or nothing can listen there.
    """
    try:
        from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server
    except ImportError:
        remedy = "pip install prometheus-client"
        raise LaunchError(f"--metrics-port needs prometheus-client, which is not installed. Remedy: {remedy}") from None
    host, port = address
    registry = CollectorRegistry()
    registry.register(_Ranks())
    try:
        server, thread = start_http_server(port, host, registry)
        server.set_app(_at_its_path(make_wsgi_app(registry)))
    except OSError as problem:
        raise LaunchError(f"--metrics-port {host}:{port}: {problem.strerror}. Remedy: choose another port") from problem
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _at_its_path(metrics: Callable[..., Any]) -> Callable[..., Any]:
    """The application at /metrics alone: prometheus-client answers at every path."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        if environ["PATH_INFO"] == "/metrics":
            return metrics(environ, start_response)
        start_response("404 Not Found", [("Content-Type", "text/plain")])
        return [b"the figures are at /metrics\n"]

    return answer


class _Ranks:
    """The metrics of all ranks, taken whenever they are asked for."""

    def describe(self) -> list[Any]:
        """None, so that nobody is asked when this is registered."""
        return []

    def collect(self) -> Iterator[Any]:
        """One family for each figure, with a sample for each rank."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        try:
            jobs = ask(str(os.getpid()), "status")[:1]
        except LaunchError:  # it has not begun, or is over
            jobs = []
        ranks = [rank for job in jobs for rank in job.ranks]
        late = {rank: seconds for each in ranks for rank, seconds in each.late_seconds.items()}
        known = [rank for rank in ranks if rank.has_page]
        for kind, name, text, values in (
            (GaugeMetricFamily, "up", "1 if the process runs", [(rank, float(not rank.has_ended)) for rank in ranks]),
            (
                GaugeMetricFamily,
                "memory_bytes",
                "Memory of the process",
                [(rank, rank.memory_kib * 1024) for rank in ranks],
            ),
            (CounterMetricFamily, "steps", "Steps of wrapped optimizers", [(rank, rank.steps) for rank in known]),
            (CounterMetricFamily, "reduced_bytes", "Bytes reduced", [(rank, rank.reduced_bytes) for rank in known]),
            (
                GaugeMetricFamily,
                "waits_seconds",
                "For how long the rank or its GPU has waited for others in its oldest operation",
                [(rank, rank.waited[0]) for rank in known],
            ),
            (
                CounterMetricFamily,
                "waited_for_seconds",
                "How long other ranks have waited for the rank",
                [(rank, late.get(rank.rank, 0.0)) for rank in known],
            ),
        ):
            family = kind(f"horovodish_rank_{name}", text, labels=("rank", "host"))
            for rank, value in values:
                family.add_metric((str(rank.rank), rank.host), value)
            yield family
        hosts = {rank.rank: rank.host for rank in ranks}
        sent = CounterMetricFamily(
            "horovodish_rank_sent_bytes", "Bytes sent to another host, or within one", labels=("rank", "host", "link")
        )
        for rank in ranks:
            for link, size in sent_by(rank, hosts).items():
                sent.add_metric((str(rank.rank), rank.host, link), size)
        yield sent
