"""The official OpenPI client, unmodified, against a robot pipeline: one scenario a run.

    .venv-openpi/bin/python tests/official_client/robots.py --uri ws://127.0.0.1:8000 policy_loop

The policy is `tests.workers.vla.policies:Counting`: its actions are the number of the
observation in its session, plus its `state`. Prints `ok SCENARIO`; an assertion fails otherwise.
"""

from __future__ import annotations

import argparse
import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import websockets.exceptions
import websockets.sync.client
from openpi_client.action_chunk_broker import ActionChunkBroker
from openpi_client.websocket_client_policy import WebsocketClientPolicy

HORIZON, DIMENSIONS = 4, 2
RETRY_S = 0.2


def observation(prompt: str = "go", **more: Any) -> dict[str, Any]:
    """What a robot of two cameras senses."""
    rng = np.random.default_rng(0)
    image, wrist = rng.integers(0, 255, (2, 224, 224, 3), np.uint8)
    return {
        "observation/image": image,
        "observation/wrist_image": wrist,
        "state": np.zeros(8),
        "prompt": prompt,
        **more,
    }


def raised(kind: Any, call: Callable[..., object], *arguments: object) -> Any:
    """The error of that kind that a call raises."""
    try:
        call(*arguments)
    except kind as error:
        return error
    raise AssertionError("nothing was raised")


def policy_loop(uri: str, key: str | None) -> None:
    policy = WebsocketClientPolicy(uri, api_key=key)
    metadata = policy.get_server_metadata()
    assert metadata["horizon"] == HORIZON
    assert metadata["low"].tolist() == [0.0] * DIMENSIONS
    for number in range(1, 21):
        answer = policy.infer(observation())
        assert answer["actions"].shape == (HORIZON, DIMENSIONS)
        assert answer["actions"].dtype == np.float32
        assert np.all(answer["actions"] == number)
        timing = answer["server_timing"]
        assert set(timing) == {"infer_ms"} | ({"prev_total_ms"} if number > 1 else set())
        times = [*timing.values(), answer["policy_timing"]["infer_ms"]]
        assert all(type(value) is float and value >= 0 for value in times), times
        assert answer["policy_timing"]["infer_ms"] <= timing["infer_ms"]
    policy.reset()


def action_chunk_broker(uri: str, key: str | None) -> None:
    broker = ActionChunkBroker(WebsocketClientPolicy(uri, api_key=key), HORIZON)
    for number in range(1, 4):
        for _ in range(HORIZON):
            step = broker.infer(observation())
            assert step["actions"].shape == (DIMENSIONS,)
            assert step["actions"][0] == number
            assert type(step["server_timing"]["infer_ms"]) is float
    broker.infer(observation())
    broker.reset()
    assert broker.infer(observation())["actions"][0] == 5


def errors(uri: str, key: str | None) -> None:
    for prompt, code in (("fail", "engine_failed"), ("refuse", "no_such_task")):
        policy = WebsocketClientPolicy(uri, api_key=key)
        policy.infer(observation())
        failed = raised(RuntimeError, policy.infer, observation(prompt))
        assert f"Error in inference server:\n{code}: " in str(failed), failed
        closed = raised(websockets.exceptions.ConnectionClosed, policy.infer, {})
        assert closed.rcvd.code == 1011
    assert np.all(WebsocketClientPolicy(uri, api_key=key).infer(observation())["actions"] == 1)


def slow_call(uri: str, key: str | None) -> None:
    """A call that takes several times what the client's keep-alive allows: a server whose loop
    waited for it would be given up."""
    client: Any = websockets.sync.client
    client.connect = functools.partial(client.connect, ping_interval=0.1, ping_timeout=0.3)
    policy = WebsocketClientPolicy(uri, api_key=key)
    assert np.all(policy.infer(observation("slow"))["actions"] == 1)
    assert np.all(policy.infer(observation())["actions"] == 2)


def odd_arrays(uri: str, key: str | None) -> None:
    odd: list[Any] = [
        np.array(1.5),
        np.array(3, "<i8"),
        np.zeros((0, 3), np.float32),
        np.array([True, False]),
        np.array([1.5, -2], np.float16),
        np.array([1, 2], ">i4"),
        np.array([1, 2], ">f8"),
        np.arange(24).reshape(2, 3, 4)[:, ::2].T,
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(["ä", "bc"]),
        np.array([b"x", b"yz"]),
        np.array([np.nan, np.inf]),
        np.float32(2.5),
        np.uint8(200),
        np.bool_(True),
        "Straße 日本",
        b"\x00\xff",
        2**63,
        -(2**63),
        None,
    ]
    policy = WebsocketClientPolicy(uri, api_key=key)
    (back,) = policy.infer(observation(also=[odd]))["also"]
    assert len(back) == len(odd)
    for sent, got in zip(odd, back, strict=True):
        assert type(got) is type(sent), (sent, got)
        if isinstance(sent, np.ndarray):
            assert (got.dtype.str, got.shape) == (sent.dtype.str, sent.shape)
            assert got.tobytes() == sent.tobytes()
        else:
            assert got == sent
    top = {f"odd/{number}": value for number, value in enumerate(odd)}
    assert policy.infer(observation(nested={"deeper": top}, **top))["actions"].shape == (4, 2)
    # The client itself does not send these.
    raised(ValueError, policy.infer, observation(bad=np.zeros(2, "c8")))
    assert np.all(policy.infer(observation())["actions"] == 3)


def ten_at_once(uri: str, key: str | None) -> None:
    wrong: list[object] = []
    together = threading.Barrier(10)

    def robot(number: int) -> None:
        try:
            policy = WebsocketClientPolicy(uri, api_key=key)
            together.wait(30)
            for count in range(1, 21):
                state = np.full(8, 1000 * number)
                answer = policy.infer(observation(state=state))
                assert np.all(answer["actions"] == 1000 * number + count), answer
        except BaseException as error:
            wrong.append(error)
            together.abort()

    robots = [threading.Thread(target=robot, args=(number,)) for number in range(10)]
    for thread in robots:
        thread.start()
    for thread in robots:
        thread.join()
    assert not wrong, wrong


def restart(uri: str, key: str | None) -> None:
    """Between two observations the gateway is killed: whoever runs this is told when."""
    policy = WebsocketClientPolicy(uri, api_key=key)
    policy.infer(observation())
    print("connected", flush=True)
    sys.stdin.readline()
    gone = (websockets.exceptions.ConnectionClosed, OSError)
    raised(gone, policy.infer, observation())
    while True:
        try:
            policy = WebsocketClientPolicy(uri, api_key=key)
        except OSError:
            time.sleep(RETRY_S)
            continue
        break
    assert np.all(policy.infer(observation())["actions"] == 1)


def without_key(uri: str, key: str | None) -> None:
    for other in (None, "some-other-key"):
        connect = functools.partial(WebsocketClientPolicy, uri, api_key=other)
        refused = raised(websockets.exceptions.InvalidStatus, connect)
        assert refused.response.status_code == 401
    assert np.all(WebsocketClientPolicy(uri, api_key=key).infer(observation())["actions"] == 1)


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        policy_loop,
        action_chunk_broker,
        errors,
        slow_call,
        odd_arrays,
        ten_at_once,
        restart,
        without_key,
    )
}


def main() -> None:
    """Play one scenario."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--uri", required=True)
    parser.add_argument("--key")
    parser.add_argument("scenario", choices=SCENARIOS)
    options = parser.parse_args()
    assert np.__version__.startswith("1."), np.__version__
    SCENARIOS[options.scenario](options.uri, options.key)
    print("ok", options.scenario)


if __name__ == "__main__":
    main()
