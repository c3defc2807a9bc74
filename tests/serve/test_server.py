"""A real server process on the loopback address: right answers, whatever others send."""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import schemathesis
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import negative_data_rejection, positive_data_acceptance
from torch import Tensor

import offmap
from browsing import browser
from shells import ENVIRONMENT
from trained import inputs, quick, regression, regressor

TOKEN = "a-token"
COLUMNS = ["temp", "humidity", "x[0]"]
LIMITS = ["--most-rows", "64", "--most-bytes", "20000", "--body-seconds", "1", "--window", "50", "--alert", "0.3"]


@dataclass(frozen=True)
class Server:
    """A running server, the guard behind it, and who asks it."""

    guard: offmap.Guard
    url: str
    client: httpx.Client
    pid: int
    log: Path

    def logged(self) -> list[dict[str, Any]]:
        """Every line of the log, as JSON."""
        return [json.loads(line) for line in self.log.read_text(encoding="utf-8").splitlines()]

    def post(self, content: bytes, kind: str = "application/json", token: str = TOKEN) -> httpx.Response:
        return self.client.post("/score", content=content, headers={"Content-Type": kind, "Authorization": f"Bearer {token}"})

    def ask(self, rows: Tensor) -> dict[str, Tensor]:
        result = self.post(json.dumps({"inputs": rows.tolist()}).encode())
        assert result.status_code == 200, result.text
        return {name: torch.tensor(values) for name, values in result.json().items() if name not in ("terms", "threshold")}

    def get(self, path: str) -> httpx.Response:
        return self.client.get(path, headers={"Authorization": f"Bearer {TOKEN}"})

    def metric(self, name: str) -> float:
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.get("/metrics").text, re.MULTILINE)
        assert found, name
        return float(found[1])


@contextlib.contextmanager
def start_server(path: Path, log: Path, *words: str) -> Generator[tuple[str, subprocess.Popen[str]]]:
    """A server process, which logs to a file, and its address; it must end well when told to."""
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "offmap", "serve", str(path), "--port", "0", *LIMITS, *words],
            stdout=subprocess.PIPE, stderr=file, text=True, env=ENVIRONMENT | {"OFFMAP_TOKEN": TOKEN},
        )  # fmt: skip
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, line + log.read_text(encoding="utf-8")
        yield found[0], process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 0
    written = log.read_text(encoding="utf-8")
    assert "Traceback" not in written
    assert re.search(r"Stopped: \d+ rows scored, \d+ of them off the map", written.splitlines()[-1])
    assert TOKEN not in written


@pytest.fixture(scope="module")
def guard() -> offmap.Guard:
    return quick(regressor(), regression(40, 0), regression(40, 1), score="epistemic")


@pytest.fixture(scope="module")
def exported(guard: offmap.Guard, tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = replace(guard, about={"inputs": COLUMNS})
    return named.export(tmp_path_factory.mktemp("served") / "g.onnx", inputs(4, 2)).path


@pytest.fixture(scope="module")
def server(guard: offmap.Guard, exported: Path) -> Generator[Server]:
    log = exported.parent / "log"
    with (
        start_server(exported, log, "--access-log", "--log-format", "json") as (url, process),
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        yield Server(guard, url, client, process.pid, log)


def slowly(url: str, body: bytes) -> socket.socket:
    """A request whose body is still to come."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    outputs = ["POST /score HTTP/1.1", "Host: x", f"Authorization: Bearer {TOKEN}", "Content-Type: application/json"]
    connection.sendall("\r\n".join([*outputs, f"Content-Length: {len(body)}", "", ""]).encode() + body[:1])
    return connection


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_answers_are_the_guards(server: Server) -> None:
    x = torch.cat([inputs(5, 4), 20 + inputs(5, 4)])
    result, outputs = server.guard(x), server.ask(x)
    assert list(outputs) == ["mean", "std", "score", "ood", "p_value"]
    for name, values in outputs.items():
        torch.testing.assert_close(values, getattr(result, name), rtol=1e-4, atol=1e-4)
    assert outputs["ood"].any()
    for array in (x.numpy(), np.asfortranarray(x.numpy()), x.double().numpy()):
        again = server.post(npy(array), "application/x-npy; charset=binary").json()
        torch.testing.assert_close(torch.tensor(again["score"]), outputs["score"], rtol=1e-5, atol=1e-6)
    large = server.post(b'{"inputs": [[1' + b"0" * 30 + b", 0, 1]]}").json()  # a whole number that 64 bits do not hold
    assert large["ood"] == [True]
    named = server.post(json.dumps({"inputs": {"input": x.tolist()}}).encode()).json()
    assert named["ood"] == outputs["ood"].tolist()
    rows = [dict(reversed([*zip(COLUMNS, row, strict=True)])) for row in x.tolist()]
    assert (
        server.post(json.dumps({"rows": rows}).encode()).json() == server.post(json.dumps({"inputs": x.tolist()}).encode()).json()
    )
    assert named["threshold"] == pytest.approx(server.guard.threshold)


def head(shape: tuple[int, ...]) -> bytes:
    """The header of an NPY file that claims this shape."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


ROW = [[0.1, 0.2, 0.3]]
BAD: dict[str, tuple[bytes, str, int, str]] = {
    "no JSON": (b"{", "application/json", 422, "the body cannot be parsed"),
    "not UTF-8": (b"\xff\xfe\xfa", "application/json", 422, "the body cannot be parsed"),
    "not UTF-8, but JSON": ('{"inputs": [[true, 1, 0]]}'.encode("utf-16"), "application/json", 422, "cannot be parsed: 'utf-8'"),
    "nothing": (b"", "application/json", 422, "the body cannot be parsed"),
    "deep": (b'{"inputs":' + b"[" * 9000, "application/json", 413, "Expected at most 64 rows, but the body has 9001 lists"),
    "deep and whole": (b'{"inputs":' + b"[" * 900 + b"]" * 900 + b"}", "application/json", 422, "Expected"),
    "a list": (json.dumps(ROW).encode(), "application/json", 422, 'Expected {"inputs": [[…], …]}'),
    "another name": (json.dumps({"rows": ROW}).encode(), "application/json", 422, "Expected"),
    "NaN": (b'{"inputs": [[NaN, 1, 2]]}', "application/json", 422, "NaN is not a JSON number"),
    "too large a number": (b'{"inputs": [[1e300, 1, 2]]}', "application/json", 422, "finite float32"),
    "words": (b'{"inputs": [["1", "2", "3"]]}', "application/json", 422, "Expected numbers"),
    "truth values": (b'{"inputs": [[true, false, true]]}', "application/json", 422, "Expected numbers"),
    "a truth value among numbers": (b'{"inputs": [[0.5, true, 1]]}', "application/json", 422, "Expected numbers"),
    "ragged": (b'{"inputs": [[1, 2, 3], [1, 2]]}', "application/json", 422, "rows of one length"),
    "too wide": (b'{"inputs": [[1, 2, 3, 4]]}', "application/json", 422, "`input` of shape (rows, 3), but got (1, 4)"),
    "no rows": (b'{"inputs": []}', "application/json", 422, "Expected"),
    "too many rows": (json.dumps({"inputs": 65 * ROW}).encode(), "application/json", 413, "at most 64 rows, but got 65"),
    "another type": (b"1,2,3", "text/csv", 415, "Content-Type application/json or application/x-npy, but got 'text/csv'"),
    "JSON called NPY": (json.dumps({"inputs": ROW}).encode(), "application/x-npy", 422, "header cannot be read"),
    "pickled": (npy(np.array([object()], dtype=object)), "application/x-npy", 422, "array of numbers, but got object"),
    "cut short": (npy(np.zeros((9, 3), np.float32))[:-4], "application/x-npy", 422, "Expected 108 bytes after the header"),
    "columns without end": (head((0, 10**20)), "application/x-npy", 422, "(rows, 3), but got (0, 1000000"),
    "axes without end": (head((1,) * 300), "application/x-npy", 422, "(rows, 3), but got (1, 1, "),
    "a truth value as length": (head((True, 3)) + bytes(12), "application/x-npy", 422, "but got float32 of shape (True, 3)"),
    "no rows in NPY": (head((0, 3)), "application/x-npy", 422, "at least one row"),
    "NPY with NaN": (npy(np.full((1, 3), np.nan)), "application/x-npy", 422, "finite"),
}


@pytest.mark.parametrize("case", BAD)
def test_bodies_that_make_no_sense_are_refused_with_the_reason(case: str, server: Server) -> None:
    body, kind, status, message = BAD[case]
    counts = [f'offmap_requests_total{{code="{code}"}}' for code in (200, status)]
    server.post(b"1,2,3", "text/csv")
    server.post(body, kind)
    packed = server.client.post("/score", content=b"", headers={"Content-Encoding": "gzip", "Authorization": f"Bearer {TOKEN}"})
    assert packed.status_code == 415
    assert packed.json()["detail"] == "Expected a body as it is, but got Content-Encoding 'gzip'. Send it unpacked."
    server.ask(torch.tensor(ROW))
    before = [server.metric(count) for count in counts]
    result = server.post(body, kind)
    assert result.status_code == status
    assert message in result.json()["detail"]
    assert [server.metric(count) - number for count, number in zip(counts, before, strict=True)] == [0, 1]
    line = next(line for line in reversed(server.logged()) if line.get("path") == "/score")
    assert (line["level"], line["status"], line["reason"]) == ("WARNING", status, result.json()["detail"])


def test_a_header_that_promises_much_costs_nothing(server: Server) -> None:
    body = npy(np.zeros((1, 3), np.float32)).replace(b"(1, 3), }" + b" " * 12, b"(99999999999, 3), }" + b" " * 2)
    result = server.post(body, "application/x-npy")
    assert (result.status_code, "bytes after the header" in result.text) == (422, True)


def test_who_has_no_token_gets_no_numbers(server: Server) -> None:
    body = json.dumps({"inputs": ROW}).encode()
    for token in ("x", "a-toke", "a-token2", "ä"):
        result = server.client.post(
            "/score", content=body, headers={"Content-Type": "application/json", "Authorization": f"Bearer {token}".encode()}
        )
        assert (result.status_code, result.headers["www-authenticate"]) == (401, "Bearer")
    assert [server.client.get(path).status_code for path in ("/metrics", "/live", "/health", "/")] == [401, 401, 200, 200]


def test_bodies_that_are_too_long_or_too_slow_are_cut_off(server: Server) -> None:
    assert server.post(b" " * 20_001).status_code == 413
    chunks = (b" " * 1000 for _ in range(30))
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
    with contextlib.suppress(httpx.TransportError):  # the server may hang up before all is sent
        assert server.client.post("/score", content=chunks, headers=headers).status_code == 413
    with slowly(server.url, b"{" * 100) as slow:
        assert server.ask(torch.tensor(ROW))["score"].shape == (1,)  # others do not wait
        assert b" 408 " in slow.recv(4096).splitlines()[0]


def read_answer(connection: socket.socket) -> bytes:
    """One whole answer of /health, in however many pieces it comes."""
    received = b""
    while not received.endswith(b"}"):
        received += connection.recv(4096)
    return received


def test_headers_that_come_too_slowly_are_cut_off(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"

    def open_connection() -> socket.socket:
        return socket.create_connection((host, int(port)), timeout=20)

    with open_connection() as silent, open_connection() as dripping, open_connection() as second:
        for byte in (whole[:6], whole[6:8], whole[8:9]):
            dripping.sendall(byte)
            time.sleep(0.2)  # bytes now and then do not win more time
        second.sendall(whole)
        assert b" 200 " in read_answer(second).splitlines()[0]
        second.sendall(whole[:5])  # the next request of a kept connection has its own clock
        assert server.ask(torch.tensor(ROW))["score"].shape == (1,)  # others do not wait
        for slow in (silent, dripping, second):
            assert slow.recv(4096).startswith(b"HTTP/1.1 408 ")
            assert slow.recv(4096) == b""


def test_requests_in_time_are_answered_one_after_another(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        for _ in range(3):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
            time.sleep(0.5)
            connection.sendall(b"\r\n")
            assert b" 200 " in read_answer(connection).splitlines()[0]
            time.sleep(0.7)  # rest is no slowness: all three take longer than a header may


def test_many_at_once_get_each_their_own_answer(server: Server) -> None:
    rows = [inputs(1 + i % 7, 100 + i) for i in range(60)]
    before = server.metric("offmap_rows_total")
    with ThreadPoolExecutor(12) as pool:
        outputs = list(pool.map(server.ask, rows))
    for x, each in zip(rows, outputs, strict=True):
        torch.testing.assert_close(each["score"], server.guard.score(x), rtol=1e-4, atol=1e-4)
    assert server.metric("offmap_rows_total") - before == sum(map(len, rows))


def test_bad_requests_leave_no_memory_behind(server: Server) -> None:
    def resident() -> int:
        return int(Path(f"/proc/{server.pid}/statm").read_text().split()[1]) * 4096

    bodies = [b'{"inputs":' + b"[" * 900 + b"]" * 900 + b"}", b"x" * 19_000, b"x" * 30_000]
    for body in 10 * bodies:
        server.post(body)
    before = resident()
    for body in 60 * bodies:
        assert server.post(body).status_code in (413, 422)
    assert resident() - before < 8_000_000


def test_metrics_and_live_page_tell_the_rolling_share(server: Server) -> None:
    server.ask(inputs(1, 4).expand(50, 3) * 0)
    before = server.get("/live").json()
    flagged = server.metric("offmap_rows_flagged_total")
    server.ask(20 + inputs(25, 4))
    live = server.get("/live").json()
    assert (before["alarm"], live["alarm"], live["share"], live["window"], live["alert"]) == (
        False,
        True,
        0.5,
        50,
        0.3,
    )
    assert server.metric("offmap_rows_flagged_total") - flagged == 25
    assert (server.metric("offmap_share"), server.metric("offmap_alert")) == (0.5, 1)
    assert server.metric("offmap_threshold") == server.guard.threshold
    assert server.metric('offmap_score_bucket{le="+Inf"}') == server.metric("offmap_rows_total")
    assert 'fetch("live"' in server.client.get("/").text


def test_requests_and_alarms_are_logged_and_nothing_of_what_was_sent(server: Server) -> None:
    def read_log() -> list[dict[str, Any]]:
        server.get("/health")  # a line is written after its response: this one comes later
        return [line for line in server.logged() if line.get("path") != "/health"]

    server.ask(torch.zeros(50, 3))
    first = len(read_log())
    server.ask(20.731058 + torch.zeros(25, 3))
    server.client.get("/metrics?secret=1", headers={"Authorization": "Bearer guess-me"})
    server.ask(torch.zeros(50, 3))
    lines = read_log()[first:]
    assert [(line["level"], line["event"]) for line in lines] == [
        ("WARNING", "alarm on"), ("INFO", "request"), ("WARNING", "request"), ("INFO", "alarm off"), ("INFO", "request"),
    ]  # fmt: skip
    assert lines[0]["message"] == "Alarm on: 50.0 % of the latest 50 rows are off the map, more than 30.0 %."
    asked = {name: lines[1][name] for name in ("method", "path", "status", "rows", "flagged", "client")}
    assert asked == {"method": "POST", "path": "/score", "status": 200, "rows": 25, "flagged": 25, "client": "127.0.0.1"}
    assert (lines[2]["path"], lines[2]["status"]) == ("/metrics", 401)
    written = server.log.read_text(encoding="utf-8")
    assert not any(word in written for word in ("20.73", "secret", "guess-me", TOKEN))


def test_the_schema_names_both_kinds_of_body(server: Server) -> None:
    score = server.client.get("/openapi.json").json()["paths"]["/score"]["post"]
    assert set(score["requestBody"]["content"]) == {"application/json", "application/x-npy"}
    assert set(score["responses"]) == {"200", "401", "408", "413", "415", "422", "500", "503"}
    page = server.client.get("/docs").text
    assert "<h2>POST /score</h2>" in page
    assert "://" not in page + server.client.get("/").text  # they load nothing from elsewhere


OPERATIONS = (("/score", "POST"), ("/health", "GET"), ("/info", "GET"), ("/metrics", "GET"), ("/live", "GET"))


@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_whatever_the_schema_allows_or_forbids_gets_an_answer_that_it_names(
    path: str, method: str, mode: str, server: Server
) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    assert {(p, m.upper()) for p, methods in schema.raw_schema["paths"].items() for m in methods} == set(OPERATIONS)
    answered: set[int] = set()

    @settings(max_examples=30, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(schema[path][method].as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
    def ask(case: schemathesis.Case) -> None:
        response = case.call(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30)
        # a schema has no words for what bytes are an NPY file, and too many rows may be refused as 413
        excluded = [positive_data_acceptance] if case.media_type == "application/x-npy" else []
        excluded += [negative_data_rejection] if response.status_code == 413 else []
        case.validate_response(response, excluded_checks=excluded)
        answered.add(response.status_code)

    try:
        ask()
    except Unsatisfiable:  # what takes no body and no parameter cannot be asked wrongly
        assert (method, mode) == ("GET", "negative")
    assert 200 in answered or mode == "negative"


def test_answers_that_are_owed_are_given_before_the_server_ends(exported: Path, tmp_path: Path) -> None:
    body = json.dumps({"inputs": ROW}).encode()
    with start_server(exported, tmp_path / "log") as (url, process):
        assert httpx.get(f"{url}/health", timeout=30).status_code == 200
        with slowly(url, body) as owed:
            time.sleep(0.2)  # until the request is begun
            process.send_signal(signal.SIGTERM)
            owed.sendall(body[1:])
            assert b" 200 " in owed.recv(4096).splitlines()[0]
        process.wait(30)
    (line,) = (tmp_path / "log").read_text(encoding="utf-8").splitlines()  # what was answered well is not logged by default
    assert line.endswith(" INFO Stopped: 1 rows scored, 0 of them off the map.")


def test_the_live_page_gives_alarm_in_a_browser(server: Server) -> None:
    server.ask(20 + inputs(50, 4))
    with browser() as running:
        tab = running.new_context().new_page()
        tab.goto(server.url)
        tab.wait_for_function("document.getElementById('state').textContent.includes('asks for a token')")
        tab.fill("#token", TOKEN)
        tab.wait_for_function("document.getElementById('state').textContent.startsWith('Alarm: 100.0 % of the latest 50 rows')")
        assert float(tab.get_attribute("#alert", "y1")) > 0
        assert tab.get_attribute("#share", "points")
