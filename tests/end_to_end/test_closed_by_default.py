"""Who cannot get in, on the running product: other origins, wrong keys, plain text, side doors."""

from __future__ import annotations

import json
import os
import ssl
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from tests.deployment import VOICE_CONFIG, Deployment
from tests.end_to_end.conversation import SPEECH

KEY = "client-key-0123456789"
ADMIN_KEY = "admin-key-0123456789"
FOREIGN = "https://elsewhere.example"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


async def refusal(address: str, **options: Any) -> tuple[int, str]:
    """The status and code with which a WebSocket is refused."""
    with pytest.raises(InvalidStatus) as caught:
        await connect(address, **options)
    response = caught.value.response
    return response.status_code, json.loads(response.body or b"")["error"]["code"]


async def accepted(address: str, **options: Any) -> bool:
    """Whether a WebSocket is accepted and a session made."""
    async with connect(address, **options) as client:
        return '"session.created"' in str(await client.recv())


async def test_a_page_of_another_origin_opens_no_socket(voice: Deployment) -> None:
    address = f"{voice.ws_url}/v1/realtime"
    for origin in (FOREIGN, "null", f"http://127.0.0.1:{voice.port + 1}", "http://localhost"):
        assert await refusal(address, origin=origin) == (403, "origin_not_allowed")
    # A foreign name that was made to resolve to this machine.
    rebound = f"ws://elsewhere.example:{voice.port}/v1/realtime"
    assert await refusal(rebound, host="127.0.0.1", port=voice.port) == (403, "host_not_allowed")
    assert await accepted(address, origin=voice.base_url)
    assert await accepted(address)


async def test_a_page_of_another_origin_posts_nothing(voice: Deployment) -> None:
    async with httpx.AsyncClient(base_url=voice.base_url) as client:
        for path in ("/v1/realtime", "/v1/models", "/v1/admin/sessions", "/v1/chat/completions"):
            for method in ("POST", "PUT", "DELETE"):
                answer = await client.request(method, path, headers={"origin": FOREIGN})
                assert (answer.status_code, answer.json()["error"]["code"]) == (
                    403,
                    "origin_not_allowed",
                )
        admin = await client.get("/v1/admin/sessions", headers={"origin": FOREIGN})
        assert admin.status_code == 403
        for path in ("/", "/v1/models", "/metrics", "/v1/admin/sessions"):
            answer = await client.get(path, headers={"host": "elsewhere.example"})
            assert answer.json()["error"]["code"] == "host_not_allowed"
        # Nothing tells a foreign page that it may read what it gets.
        for path in ("/", "/v1/models", "/readyz"):
            answer = await client.get(path, headers={"origin": FOREIGN})
            assert "access-control-allow-origin" not in answer.headers


def test_only_the_gateway_listens_and_what_else_does_is_locked(voice: Deployment) -> None:
    """The model library's own server has no port, and its socket refuses without its key."""
    processes = voice.processes()
    gateway = voice.children()["gateway"]
    ports = {pid: listening_ports(pid) for pid in processes}
    assert {pid: found for pid, found in ports.items() if found} == {gateway: {voice.port}}
    sockets = {path for pid in processes for path in listening_paths(pid)}
    assert sockets
    for path in sockets:
        # Also keeps out who could name the socket: it lies in a folder of this user's alone.
        assert stat.S_IMODE(Path(path).parent.stat().st_mode) == 0o700
        assert Path(path).parent.stat().st_uid == os.geteuid()
    (library,) = (path for path in sockets if Path(path).name == "llama.sock")
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=library), base_url="http://library"
    ) as client:
        for headers in ({}, {"authorization": "Bearer no-key"}):
            body = {"prompt": "hi", "max_tokens": 1}
            answer = client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 401


def listening_ports(pid: int) -> set[int]:
    """The TCP ports that a process listens on."""
    own = socket_inodes(pid)
    return {
        int(fields[1].rsplit(":", 1)[1], 16)
        for table in ("tcp", "tcp6")
        for fields in map(str.split, Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:])
        if fields[3] == "0A" and fields[9] in own
    }


def listening_paths(pid: int) -> set[str]:
    """The Unix sockets that a process listens on; those without a path have an empty one."""
    own = socket_inodes(pid)
    return {
        fields[7] if len(fields) > 7 else ""
        for fields in map(str.split, Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:])
        # The flag of a socket that accepts connections.
        if int(fields[3], 16) & 0x10000 and fields[6] in own
    }


def socket_inodes(pid: int) -> set[str]:
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(target.removeprefix("socket:[").removesuffix("]"))
    return found


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-keyout", str(key), "-out", str(cert), "-days", "2"),
            *("-subj", "/CN=antiphon test", "-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    return cert, key


@pytest.fixture(scope="module")
def guarded(
    certificate: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """The product off loopback, with keys and TLS, saying all that it has to say."""
    config = yaml.safe_load(VOICE_CONFIG.read_text())
    config["gateway"] |= {
        "host": "0.0.0.0",
        "keys": ["${TEST_CLIENT_KEY}"],
        "admin_keys": ["${TEST_ADMIN_KEY}"],
    }
    path = tmp_path_factory.mktemp("guarded") / "voice.yaml"
    path.write_text(yaml.safe_dump(config))
    cert, key = certificate
    environment = {
        "TEST_CLIENT_KEY": KEY,
        "TEST_ADMIN_KEY": ADMIN_KEY,
        "ANTIPHON_LOG_LEVEL": "debug",
    }
    tls = ["--tls-cert", str(cert), "--tls-key", str(key)]
    with Deployment(path, *tls, environment=environment, key=ADMIN_KEY) as running:
        yield running


@pytest.fixture(scope="module")
def trusting(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate[0]))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_tls_is_served_and_nothing_else(
    guarded: Deployment, trusting: ssl.SSLContext
) -> None:
    assert guarded.base_url == f"https://127.0.0.1:{guarded.port}"
    address = f"{guarded.ws_url}/v1/realtime"
    assert await accepted(address, ssl=trusting, additional_headers=bearer(KEY))
    async with httpx.AsyncClient(verify=trusting) as client:
        assert (await client.get(f"{guarded.base_url}/readyz")).status_code == 200
        with pytest.raises(httpx.TransportError):
            await client.get(f"http://127.0.0.1:{guarded.port}/readyz")
    with pytest.raises(ssl.SSLCertVerificationError):
        await connect(address, additional_headers=bearer(KEY))


async def test_nothing_but_probes_and_metrics_is_served_without_a_key(
    guarded: Deployment, trusting: ssl.SSLContext
) -> None:
    address = f"{guarded.ws_url}/v1/realtime"
    assert await refusal(address, ssl=trusting) == (401, "missing_api_key")
    in_url = f"{address}?api_key={KEY}&key={KEY}&token={KEY}"
    assert await refusal(in_url, ssl=trusting) == (401, "missing_api_key")
    for key in ("wrong-key-0123456789", ADMIN_KEY, KEY[:-1], f"{KEY}x"):
        headers = bearer(key)
        assert await refusal(address, ssl=trusting, additional_headers=headers) == (
            401,
            "invalid_api_key",
        )
    async with connect(
        address,
        ssl=trusting,
        subprotocols=["realtime", f"openai-insecure-api-key.{KEY}"],  # type: ignore[list-item]
    ) as browser:
        # The key is not sent back.
        assert browser.subprotocol == "realtime"
    async with httpx.AsyncClient(base_url=guarded.base_url, verify=trusting) as client:
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/v1/models", headers=bearer(KEY))).status_code == 200
        for path in ("/v1/admin/sessions", "/v1/admin/workers"):
            assert (await client.get(path)).status_code == 401
            assert (await client.get(path, headers=bearer(KEY))).status_code == 401
            assert (await client.get(path, headers=bearer(ADMIN_KEY))).status_code == 200
        for path in ("/healthz", "/readyz", "/metrics"):
            assert (await client.get(path)).status_code == 200


def test_the_command_line_talks_over_tls(
    guarded: Deployment, certificate: tuple[Path, Path]
) -> None:
    talk = [sys.executable, "-m", "antiphon", "talk", "--url", guarded.base_url, "--in"]
    talk.append(str(SPEECH / "questions" / "capital_of_france.wav"))
    environment = {**os.environ, "ANTIPHON_KEY": KEY}
    refused = subprocess.run(talk, env=environment, capture_output=True, text=True, check=False)
    assert refused.returncode == 3
    assert "certificate verify failed" in refused.stderr
    environment["SSL_CERT_FILE"] = str(certificate[0])
    heard = subprocess.run(talk, env=environment, capture_output=True, text=True, check=False)
    assert heard.returncode == 0, heard.stderr
    assert "France" in heard.stdout


def test_keys_and_words_are_in_no_log_and_on_no_command_line(guarded: Deployment) -> None:
    # After what the tests above have done with right and wrong keys, and the turn they took.
    assert any('"open_refused"' in line for line in guarded.log)
    assert any('"turn_ended"' in line for line in guarded.log)
    secrets = [KEY, ADMIN_KEY, "wrong-key-0123456789", "France"]
    assert [line for line in guarded.log if any(secret in line for secret in secrets)] == []
    for pid in guarded.processes():
        line = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
        assert not any(secret in line for secret in secrets)


def test_off_loopback_without_keys_only_on_demand() -> None:
    with Deployment(VOICE_CONFIG, "--host", "0.0.0.0", "--insecure") as deployment:
        assert deployment.get("/readyz").status_code == 200
        assert deployment.get("/v1/models").status_code == 200
        # What operators see stays closed: there is no key that could open it.
        answer = deployment.get("/v1/admin/sessions")
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_not_configured")
        foreign = deployment.get("/v1/models", host="elsewhere.example")
        assert foreign.status_code == 403
