"""The command line: what it loads, what it prints when something is wrong, how it exits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest

from antiphon.main import COMMANDS, main
from protocol.device_bytes import DeviceBytes
from workers.model_registry import MODELS

ROOT = Path(__file__).parent.parent.parent


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command as a user starts it; nothing of it may end in a traceback."""
    result = subprocess.run(
        [sys.executable, "-m", "antiphon", *words],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert "Traceback" not in result.stderr
    return result


@pytest.fixture
def bad_config(tmp_path: Path) -> Path:
    path = tmp_path / "bad.yaml"
    path.write_text("stages:\n  think: {engine: ar, replicas: none}\npipelines: {}\n")
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"antiphon {command}" in capsys.readouterr().out


def test_the_version_is_the_distribution_s() -> None:
    assert run("--version").stdout.startswith("antiphon 0.")


def test_help_loads_no_command() -> None:
    code = (
        "import sys; from antiphon.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(*(name for name in sys.modules if name.startswith('antiphon.commands.')))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] == ""


@pytest.mark.parametrize("words", [(), ("dance",), ("serve",), ("check",)])
def test_wrong_usage_exits_with_2(words: tuple[str, ...]) -> None:
    result = run(*words)
    assert result.returncode == 2
    assert result.stderr.startswith("usage: antiphon")


@pytest.mark.parametrize("command", [("check",), ("serve", "-c")])
def test_a_bad_config_is_pointed_at(command: tuple[str, ...], bad_config: Path) -> None:
    result = run(*command, str(bad_config))
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        f"antiphon: {bad_config}:2: stages.think.replicas: must be a valid integer, "
        "unable to parse string as an integer",
        f"antiphon: {bad_config}:3: pipelines: needs at least 1",
    ]


@pytest.mark.parametrize("command", [("check",), ("serve", "-c")])
def test_a_config_that_is_not_there_is_said(command: tuple[str, ...], tmp_path: Path) -> None:
    result = run(*command, str(tmp_path / "none.yaml"))
    assert result.returncode == 2
    assert "none.yaml: cannot be read: No such file" in result.stderr


def test_a_good_config_is_summed_up() -> None:
    result = run("check", "examples/voice.yaml")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "examples/voice.yaml: can be served",
        "  gateway: http on 127.0.0.1 port 8080, from this machine, without a key",
        "  stage listen: engine speech-in, 1 worker",
        "  stage think: engine ar, 1 worker",
        "  stage speak: engine codec, 1 worker",
        "  pipeline voice: duplex, required, listen -> think -> speak",
        "    also called gpt-realtime, gpt-realtime-mini, gpt-4o-realtime-preview",
        "    voices joe",
        "    at most 8 sessions",
    ]


def test_an_open_door_needs_a_word() -> None:
    result = run("serve", "-c", "examples/voice.yaml", "--host", "0.0.0.0")
    assert result.returncode == 2
    assert "gateway.keys is empty" in result.stderr


@pytest.mark.parametrize("half", ["--tls-cert", "--tls-key"])
def test_half_a_certificate_is_not_served_by(half: str) -> None:
    result = run("serve", "-c", "examples/voice.yaml", half, "some.pem")
    assert result.returncode == 2
    assert "belong together" in result.stderr


@pytest.mark.parametrize("port", ["http", "70000", "-1"])
def test_the_port_of_the_environment_is_checked(port: str) -> None:
    result = run("serve", "-c", "examples/voice.yaml", ANTIPHON_PORT=port)
    assert result.returncode == 2
    assert "is not a port" in result.stderr


def test_models_are_listed_with_their_licences() -> None:
    result = run("models", "--json")
    assert result.returncode == 0, result.stderr
    listed = {entry["name"]: entry for entry in json.loads(result.stdout)}
    assert listed.keys() == MODELS.keys()
    assert listed["gemma-3-270m"]["licence"] == "Gemma Terms of Use"
    table = run("models", COLUMNS="120").stdout
    assert all(name in table for name in MODELS)


def test_an_unknown_model_is_said() -> None:
    result = run("models", "verify", "llama")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("antiphon: there is no model called llama; known are ")


def test_a_model_that_cannot_be_cached_fails_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run("models", "verify", "whisper-base", ANTIPHON_CACHE=str(tmp_path / "file"))
    assert result.returncode == 3
    assert len(result.stderr.splitlines()) == 1
    assert "model whisper-base" in result.stderr


class Admin(BaseHTTPRequestHandler):
    """A synthetic gateway that has two sessions, for the key `admin-key`."""

    sessions = (
        {"id": "sess_1", "state": "active", "age_s": 3725.1, "bytes": {"think": {"cpu": 1536}}},
        {"id": "sess_2", "state": "closing", "age_s": 7.25, "bytes": {"think": {}, "speak": {}}},
    )
    held = DeviceBytes(200 << 20, 10 << 20, engine=100 << 20, sessions=64 << 20)
    accounts = {**msgspec.structs.asdict(held), "reserved": held.reserved, "free": held.free}
    workers = (
        {
            "worker": "think-0",
            "state": "ready",
            "resident_bytes": 150 << 20,
            "devices": {"cpu": accounts, "cuda:0": {**accounts, "budget": None, "free": None}},
            "compute": {"cores": 1.5, "used": 0.456, "session": 0.1523, "turn_ms": 12.345},
        },
        {
            "worker": "think-1",
            "state": "starting",
            "resident_bytes": 0,
            "devices": {},
            "compute": {"cores": None, "used": 0.0, "session": 0.0, "turn_ms": 0.0},
        },
    )

    def do_GET(self) -> None:
        bodies: dict[str, Any] = {
            "/v1/admin/sessions": {"sessions": self.sessions},
            "/v1/admin/workers": {"workers": self.workers},
        }
        bodies |= {f"/v1/admin/sessions/{entry['id']}": entry for entry in self.sessions}
        body = bodies.get(self.path)
        self._answer(404 if body is None else 200, body)

    def do_POST(self) -> None:
        match self.path.removeprefix("/v1/admin/").split("/"):
            case ["robots" | "pipelines", *which, "stop" | "release" as what]:
                error = {"error": {"code": "model_not_found", "message": "No such robots."}}
                known = which in ([], ["arm"])
                touched = {"stopped": what == "stop", "pipelines": {"arm": ["sess_1"]}}
                self._answer(200 if known else 404, touched if known else error)
                return
        match self.path.removeprefix("/v1/admin/sessions/").split("/"):
            case ["sess_1", "park"]:
                kept = {"listen": "stage listen cannot be parked: its engine parks no sessions"}
                self._answer(200, {"id": "sess_1", "parked": ["think"], "kept": kept})
            case ["sess_1", "restore"]:
                restored, lost = {"think": "snapshot"}, {"speak": "the state is lost"}
                self._answer(200, {"id": "sess_1", "restored": restored, "lost": lost})
            case ["sess_1", "evict"]:
                self._answer(202, {"id": "sess_1", "closing": True})
            case ["sess_1", "stop" | "release" as what]:
                self._answer(200, {"session": "sess_1", "stopped": what == "stop"})
            case ["sess_2", _]:
                self._answer(409, {"error": {"code": "session_busy", "message": "It has work."}})
            case _:
                self._answer(404, None)

    def do_DELETE(self) -> None:
        known = self.path == "/v1/admin/sessions/sess_1"
        self._answer(202 if known else 404, {"id": "sess_1", "closing": True})

    def _answer(self, status: int, body: Any) -> None:
        if self.path.startswith("/v1/") and self.headers["Authorization"] != "Bearer admin-key":
            self.send_error(401)
            return
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def admin_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Admin) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_sessions_are_listed(admin_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sessions", "--url", admin_url, "--key", "admin-key", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == list(Admin.sessions)
    assert main(["sessions", "--url", f"{admin_url}/", "--key", "admin-key"]) == 0
    shown = capsys.readouterr().out
    assert [re.split(r"\s{2,}", line.strip()) for line in shown.splitlines()] == [
        ["id", "state", "age", "bytes"],
        ["sess_1", "active", "1 h 2 min", "1.5 KiB"],
        ["sess_2", "closing", "7.2 s", "0 B"],
    ]


def test_a_session_is_shown(admin_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["sessions", "--url", admin_url, "--key", "admin-key"]
    assert main([*options, "show", "sess_2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=1) for line in lines] == [
        ["id", "sess_2"],
        ["state", "closing"],
        ["age", "7.2 s"],
        ["bytes", '{"think": {}, "speak": {}}'],
    ]
    assert main([*options, "--json", "show", "sess_2"]) == 0
    assert json.loads(capsys.readouterr().out) == Admin.sessions[1]


def test_options_may_stand_behind_the_action(
    admin_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    of = ["--url", admin_url, "--key", "admin-key"]
    for words in (["show", "sess_2", *of, "--json"], ["--json", *of, "show", "sess_2"]):
        assert main(["sessions", *words]) == 0
        assert json.loads(capsys.readouterr().out) == Admin.sessions[1]
    assert main(["sessions", "--url", "http://127.0.0.1:1", "list", *of, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == list(Admin.sessions)


@pytest.mark.parametrize("action", ["close", "evict"])
def test_a_session_is_ended(
    action: str, admin_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["sessions", "--url", admin_url, "--key", "admin-key"]
    assert main([*options, action, "sess_1"]) == 0
    assert capsys.readouterr().out == "sess_1: closing\n"
    assert main([*options, "--json", action, "sess_1"]) == 0
    assert json.loads(capsys.readouterr().out) == {"id": "sess_1", "closing": True}


def test_a_session_with_a_turn_in_flight_is_not_evicted(
    admin_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["sessions", "--url", admin_url, "--key", "admin-key"]
    assert main([*options, "evict", "sess_2"]) == 1
    assert capsys.readouterr().err == "antiphon: sess_2: It has work.\n"


def test_what_became_of_a_session_is_shown(
    admin_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    timeline = {
        "dropped": 3,
        "entries": [
            {"at_ms": 0.0, "event": "opening"},
            {"at_ms": 12.3, "event": "turn_ended", "turn": 4, "ttft_ms": 81.4},
            {"at_ms": 61_500.0, "event": "restored", "stage": "think", "origin": "snapshot"},
        ],
    }
    entry = {**Admin.sessions[0], "idle_left_s": 61.0, "grace_left_s": None, "noted": 6}
    monkeypatch.setattr(Admin, "sessions", ({**entry, "timeline": timeline},))
    options = ["sessions", "--url", admin_url, "--key", "admin-key"]
    assert main([*options, "show", "sess_1"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in shown[-8:]] == [
        "idle left 1 min 1 s",
        "grace left -",
        "",
        "timeline, from the begin of the open",
        "(3 earlier entries are not kept)",
        "0.000 s opening",
        "0.012 s turn ended turn 4, ttft 81 ms",
        "61.500 s restored stage think, origin snapshot",
    ]


def test_the_clock_that_ends_a_session_first_is_listed(
    admin_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = {"idle_left_s": 250.0, "age_left_s": 3000.0, "grace_left_s": 12.0, "noted": 3}
    closing = {"idle_left_s": None, "age_left_s": None, "grace_left_s": None, "noted": 9}
    entries = ({"id": "sess_1", **clocks}, {"id": "sess_2", **closing})
    monkeypatch.setattr(Admin, "sessions", entries)
    assert main(["sessions", "--url", admin_url, "--key", "admin-key"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [re.split(r"\s{2,}", line.strip()) for line in shown] == [
        ["id", "ends in"],
        ["sess_1", "12.0 s"],
        ["sess_2", "-"],
    ]


def test_the_ledger_is_shown(admin_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "--url", admin_url, "--key", "admin-key", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == list(Admin.workers)
    assert main(["ledger", "--url", admin_url, "--key", "admin-key"]) == 0
    bytes_, processor = capsys.readouterr().out.split("\n\n")
    heading, *rows = (re.split(r"\s{2,}", row) for row in bytes_.splitlines())
    assert dict(zip(heading, rows[0], strict=True)) == {
        **{"worker": "think-0", "device": "cpu", "budget": "200 MiB", "reserved": "164 MiB"},
        **{"engine": "100 MiB", "pool": "0 B", "sessions": "64 MiB", "kept": "0 B"},
        **{"arena": "0 B", "free": "36 MiB", "resident": "150 MiB"},
    }
    assert (rows[1][1], rows[1][2], rows[1][9]) == ("cuda:0", "-", "-")
    assert rows[2][:2] == ["think-1", "(starting)"]
    assert [re.split(r"\s{2,}", row) for row in processor.splitlines()] == [
        ["worker", "cores", "used", "a session", "a turn"],
        ["think-0", "1.50", "0.46", "0.152", "12.3 ms"],
        ["think-1", "any", "0.00", "-", "-"],
    ]


@pytest.mark.parametrize(
    ("action", "said", "answer"),
    [
        (
            "park",
            "sess_1: parked think\nsess_1: stage listen cannot be parked: its engine parks no"
            " sessions\n",
            {
                "id": "sess_1",
                "parked": ["think"],
                "kept": {"listen": "stage listen cannot be parked: its engine parks no sessions"},
            },
        ),
        (
            "restore",
            "sess_1: restored think (snapshot)\nsess_1: speak: the state is lost\n",
            {
                "id": "sess_1",
                "restored": {"think": "snapshot"},
                "lost": {"speak": "the state is lost"},
            },
        ),
    ],
)
def test_a_session_is_put_away_and_brought_back(
    action: str,
    said: str,
    answer: dict[str, Any],
    admin_url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["sessions", "--url", admin_url, "--key", "admin-key"]
    assert main([*options, action, "sess_1"]) == 0
    assert capsys.readouterr().out == said
    assert main([*options, "--json", action, "sess_1"]) == 0
    assert json.loads(capsys.readouterr().out) == answer
    assert main([*options, action, "sess_2"]) == 1
    assert capsys.readouterr().err == "antiphon: sess_2: It has work.\n"


@pytest.mark.parametrize(("action", "still"), [("stop", "stopped"), ("release", "released")])
def test_robots_are_stopped_and_released(
    action: str, still: str, admin_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["sessions", "--url", admin_url, "--key", "admin-key"]
    assert main([*options, action, "sess_1"]) == 0
    assert capsys.readouterr().out == f"sess_1: {still}\n"
    for which in (["--all"], ["--pipeline", "arm"]):
        assert main([*options, action, *which]) == 0
        assert capsys.readouterr().out == f"sess_1: {still}\narm: {still}, new sessions included\n"
    assert main([*options, "--json", action, "--all"]) == 0
    told = {"stopped": action == "stop", "pipelines": {"arm": ["sess_1"]}}
    assert json.loads(capsys.readouterr().out) == told
    assert main([*options, action, "--pipeline", "leg"]) == 2
    assert capsys.readouterr().err == "antiphon: No such robots.\n"


@pytest.mark.parametrize("action", ["show", "park", "restore", "evict", "close", "stop", "release"])
def test_a_session_that_is_not_there_is_said(
    action: str, admin_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sessions", "--url", admin_url, "--key", "admin-key", action, "sess_9"]) == 1
    assert capsys.readouterr().err == "antiphon: there is no session sess_9\n"


def test_a_refused_admin_key_is_said(admin_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sessions", "--url", admin_url, "--key", "other-key"]) == 2
    assert "give an admin key" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["/elsewhere", ""])
def test_no_gateway_is_said(path: str, admin_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"{admin_url}{path}" if path else "http://127.0.0.1:1"
    assert main(["sessions", "--url", url]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("antiphon: ")
