"""What the gateway itself says of the chunks that it gave."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

from antiphon.evaluation.errors import EvaluationFailed
from protocol.addresses import is_loopback
from protocol.errors import InvalidRequest

TIMEOUT_S = 10.0


def check_address(url: str) -> None:
    """Raise InvalidRequest for what is no address of a gateway."""
    try:
        parsed = httpx.URL(_with_scheme(url))
    except httpx.InvalidURL as error:
        raise InvalidRequest(f"--url {url!r} is no address: {error}", field="url") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InvalidRequest(f"--url is like http://HOST:PORT, not {url!r}", field="url")


def completed_turns(url: str, pipeline: str) -> int:
    """How many turns of the pipeline have been completed: for robots, chunks.

    Raises EvaluationFailed without an answer, InvalidRequest if there is no such pipeline.
    """
    address = f"{_with_scheme(url).rstrip('/')}/metrics"
    try:
        proxied = not is_loopback(httpx.URL(address).host)
        answer = httpx.get(address, timeout=TIMEOUT_S, trust_env=proxied).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EvaluationFailed(f"no answer from {address}: {error}") from None
    pipelines: set[str] = set()
    completed = 0
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            if sample.name == "antiphon_sessions":
                pipelines.add(sample.labels["pipeline"])
            elif sample.name == "antiphon_turns_total" and sample.labels == {
                "pipeline": pipeline,
                "status": "completed",
            }:
                completed = int(sample.value)
    if pipeline not in pipelines:
        known = ", ".join(sorted(pipelines)) or "none"
        raise InvalidRequest(f"{url} has no pipeline {pipeline}; it has {known}", field="pipeline")
    return completed


def _with_scheme(url: str) -> str:
    return url if "://" in url else f"http://{url}"
