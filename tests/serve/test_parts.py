"""What the server is made of, without a server."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import generate_latest
from safetensors.torch import save_file
from scipy import stats
from starlette.testclient import TestClient

from offmap import cli
from offmap.errors import ConfigError, FileError
from offmap.export.onnx import add_checksum
from offmap.serve import app as application
from offmap.serve import monitor as monitoring
from offmap.serve.app import Limits, create_app, listen
from offmap.serve.logs import UNEXPECTED, TextFormatter
from offmap.serve.model import Batcher, Model
from offmap.serve.monitor import Monitor, alert_count
from offmap.serve.parsing import Arrays, InputSpec, RequestError, parse_inputs


def double(inputs: Arrays) -> Arrays:
    """A model that fails on negative numbers."""
    if (inputs["x"] < 0).any():
        raise ValueError("negative")
    return {"score": 2 * inputs["x"]}


def test_requests_that_wait_are_run_together_and_one_that_fails_fails_alone() -> None:
    async def ask() -> tuple[list[Arrays | BaseException], int]:
        batcher = Batcher(double, together=10)
        asked = [batcher({"x": np.array([float(i), i + 0.5])}) for i in range(20)] + [batcher({"x": np.array([-1.0])})]
        waiting = asyncio.gather(*asked, return_exceptions=True)
        await asyncio.sleep(0)
        task = asyncio.create_task(batcher.run())
        results = await asyncio.wait_for(waiting, 20)
        task.cancel()
        batcher.thread.shutdown()
        return results, batcher.calls

    results, calls = asyncio.run(ask())
    for i, each in enumerate(results[:20]):
        assert isinstance(each, dict)
        assert each["score"].tolist() == [2.0 * i, 2.0 * i + 1]
    assert isinstance(results[20], RequestError)
    assert (results[20].status, results[20].reason) == (500, "The model failed on these rows: negative.")
    assert calls == 5  # four full ones and that of the bad request


def test_more_rows_than_may_wait_are_sent_away_and_those_who_left_are_not_run() -> None:
    async def ask() -> int:
        batcher = Batcher(double, together=10, max_waiting=4)
        first = asyncio.create_task(batcher({"x": np.zeros(3)}))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="Too many rows are waiting"):
            await batcher({"x": np.zeros(2)})
        first.cancel()
        await asyncio.sleep(0)
        task = asyncio.create_task(batcher.run())
        for _ in range(100):
            await asyncio.sleep(0)
        assert (batcher.rows, len(batcher.queue)) == (0, 0)
        last = await asyncio.wait_for(batcher({"x": np.ones(2)}), 20)
        task.cancel()
        batcher.thread.shutdown()
        assert last["score"].tolist() == [2, 2]
        return batcher.calls

    assert asyncio.run(ask()) == 1


def test_the_rolling_share_is_that_of_the_latest_rows() -> None:
    chance, now = random.Random(0), [0.0]
    monitor = Monitor(Model(None, (), (), 0.0), 7, 0.5, clock=lambda: now[0])
    verdicts: list[bool] = []
    for _ in range(60):
        new = [chance.random() < 0.4 for _ in range(chance.randrange(1, 12))]
        verdicts += new
        now[0] += 0.4
        monitor.count_rows({"score": np.array([1.0 if ood else -1.0 for ood in new]), "ood": np.array(new)})
        assert monitor.share == sum(verdicts[-7:]) / len(verdicts[-7:])
        assert monitor.to_dict()["alarm"] == (monitor.share > 0.5)
    assert (monitor.to_dict()["rows"], monitor.to_dict()["flagged"]) == (len(verdicts), sum(verdicts))
    assert f'offmap_score_bucket{{le="0.0"}} {len(verdicts) - sum(verdicts)}.0' in generate_latest(monitor.registry).decode()
    assert len(monitor.line) == 20  # a point every third answer: not two within a second
    monitor.count_rows({"score": np.array([np.inf]), "ood": np.array([True])})
    assert f"offmap_score_count {len(verdicts) + 1}.0" in generate_latest(monitor.registry).decode()


def test_several_inputs_come_by_name() -> None:
    wanted = [InputSpec("ids", (None,), np.int64), InputSpec("scale", (), np.float32)]
    body = b'{"inputs": {"ids": [[1, 2], [3, 4]], "scale": [0.5, 1]}}'
    made = parse_inputs("application/json", body, wanted, 10)
    assert {name: (a.dtype, a.shape) for name, a in made.items()} == {"ids": (np.int64, (2, 2)), "scale": (np.float32, (2,))}
    for other, message in (
        (b'{"inputs": {"ids": [[1, 2]], "scale": [0.5, 1]}}', "one row per example in every input"),
        (b'{"inputs": {"ids": [[1.5, 2]], "scale": [0.5]}}', "whole numbers in `ids`"),
        (b'{"inputs": {"ids": [[1, 2]]}}', "with a row per example"),
    ):
        with pytest.raises(RequestError, match=message):
            parse_inputs("application/json", other, wanted, 10)


def test_files_that_are_no_exported_guard_are_refused(tmp_path: Path) -> None:
    (tmp_path / "words.onnx").write_bytes(b"words")
    rows = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["rows", 3])
    made = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["rows", 3])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "other", [rows], [made])
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), tmp_path / "other.onnx"
    )
    save_file({"a": torch.zeros(2)}, tmp_path / "g.safetensors")
    torch.save({}, tmp_path / "g.pt2")  # a zip archive, too
    for name in ("words", "other"):
        (tmp_path / f"{name}-sealed.onnx").write_bytes(add_checksum((tmp_path / f"{name}.onnx").read_bytes()))
    for name, message in (
        ("none.onnx", "there is none"),
        ("words.onnx", "words.onnx has a wrong checksum: damaged, changed, or not written by `Guard.export`"),
        ("other.onnx", "other.onnx has a wrong checksum"),
        ("words-sealed.onnx", "cannot read"),
        ("other-sealed.onnx", "is another ONNX model"),
        ("g.safetensors", "is a guard file, which needs its model and Python. Export both .* `offmap export .* g.onnx --model"),
        ("g.pt2", "is an archive for torch. Export the guard to .onnx"),
    ):
        with pytest.raises(FileError, match=message):
            Model.load(tmp_path / name)


FACTS = {
    "threshold": "2.5", "false_alarms": "0.05", "levels": "0.5 1", "calibration_rows": "1000", "calibrated": "false",
    "columns": '["temp", "humidity", "x[0]"]', "terms": '["inputs", "layers"]',
}  # fmt: skip


def write_graph(path: Path, **facts: str) -> Path:
    """A graph as an export writes it: the score is the sum of a row, the p-value 1/(1 + e^score), two terms are two columns."""
    helper, kinds = onnx.helper, onnx.TensorProto
    nodes = [
        helper.make_node("ReduceSum", ["input", "axes"], ["score"], keepdims=0),
        helper.make_node("Greater", ["score", "bound"], ["ood"]),
        helper.make_node("Identity", ["bound"], ["threshold"]),
        helper.make_node("Neg", ["score"], ["less"]),
        helper.make_node("Sigmoid", ["less"], ["p_value"]),
        helper.make_node("Gather", ["input", "two"], ["terms"], axis=1),
    ]
    constants = [
        helper.make_tensor("axes", kinds.INT64, [1], [1]),
        helper.make_tensor("bound", kinds.FLOAT, [], [2.5]),
        helper.make_tensor("two", kinds.INT64, [2], [0, 1]),
    ]
    shapes = {"score": (kinds.FLOAT, ["rows"]), "ood": (kinds.BOOL, ["rows"]), "p_value": (kinds.FLOAT, ["rows"])}
    shapes |= {"terms": (kinds.FLOAT, ["rows", 2]), "threshold": (kinds.FLOAT, [])}
    outputs = [helper.make_tensor_value_info(name, *shape) for name, shape in shapes.items()]
    inputs = [helper.make_tensor_value_info("input", kinds.FLOAT, ["rows", 3])]
    graph = helper.make_graph(nodes, "guard", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    for key, value in (FACTS | facts).items():
        model.metadata_props.add(key=f"offmap.{key}", value=value)
    path.write_bytes(add_checksum(model.SerializeToString()))
    return path


@pytest.fixture
def served(tmp_path: Path) -> Model:
    return Model.load(write_graph(tmp_path / "g.onnx"))


def test_p_values_terms_and_threshold_are_answered_and_columns_go_by_name(served: Model) -> None:
    with TestClient(create_app(served, Limits(max_rows=4))) as client:
        expected = {
            "score": [0.0, 3.0], "ood": [False, True], "p_value": pytest.approx([0.5, 0.0474], abs=1e-4),
            "terms": {"inputs": [0.0, 1.0], "layers": [0.0, 0.5]}, "threshold": 2.5,
        }  # fmt: skip
        assert client.post("/score", json={"inputs": [[0, 0, 0], [1, 0.5, 1.5]]}).json() == expected
        rows = [{"humidity": 0, "temp": 0, "x[0]": 0}, {"x[0]": 1.5, "humidity": 0.5, "temp": 1}]
        assert client.post("/score", json={"rows": rows}).json() == expected
        for wrong, message in (
            ([{"tmp": 1, "humidity": 0, "x[0]": 1}], "row 1 has 'tmp' (did you mean 'temp'?)"),
            ([*rows, {"temp": 1, "humidity": 0, "x[0]": 1, "?": 1}], "row 3 has '?'. GET /info lists the columns"),
            ([*rows, {"temp": 1}], "row 3 lacks 'humidity' and 1 more"),
            ([[1, 2, 3]], 'Expected {"rows": [{"temp": …}, …]}, an object for each row'),
            ([{"temp": True, "humidity": 0, "x[0]": 1}], "Expected numbers"),
            ([{"temp": [1], "humidity": 0, "x[0]": 1}], "Expected rows of one length"),
            (3 * rows, "at most 4 rows, but got 6"),
        ):
            assert message in client.post("/score", json={"rows": wrong}).json()["detail"]
        twice = client.post("/score", content=b'{"rows": [{"temp": 1, "temp": 2, "humidity": 0}]}', headers=JSON)
        assert "a name comes twice in one object" in twice.json()["detail"]
        both = client.post("/score", json={"rows": [], "inputs": [[1, 2, 3]]})
        assert 'Expected {"inputs": [[…], …]} or {"rows": [{"temp": …}, …]}' in both.json()["detail"]
        info = client.get("/info").json()
        assert (info["columns"], info["terms"], info["threshold"]) == (["temp", "humidity", "x[0]"], ["inputs", "layers"], 2.5)
        assert (info["false_alarms"], info["calibration_rows"], info["calibrated"]) == (0.05, 1000, False)
        assert info["inputs"] == [{"name": "input", "shape": [3], "dtype": "float32", "allow_nan": False}]
        assert "offmap_p_value_count 4.0" in client.get("/metrics").text
        schema = client.get("/openapi.json").json()["paths"]["/score"]["post"]["requestBody"]["content"]["application/json"]
        assert list(schema["schema"]["anyOf"][1]["properties"]["rows"]["items"]["properties"]) == info["columns"]


JSON = {"Content-Type": "application/json"}


def test_rows_without_names_go_by_position_alone(tmp_path: Path) -> None:
    model = Model.load(write_graph(tmp_path / "g.onnx", columns="null"))
    with TestClient(create_app(model, Limits())) as client:
        refused = client.post("/score", json={"rows": [{"temp": 1}]})
        assert (refused.status_code, refused.json()["detail"]) == (422, 'Expected {"inputs": [[…], …]} with a row per example.')


@pytest.mark.parametrize(
    "facts",
    [
        {"columns": '["a", "b"]'}, {"columns": '["a", "a", "b"]'}, {"columns": "[1, 2, 3]"}, {"columns": "3"}, {"columns": "[a"},
        {"terms": "null"}, {"terms": "[]"}, {"false_alarms": "0"}, {"false_alarms": "x"}, {"calibration_rows": "-1"},
        {"threshold": "nan"},
    ],
    ids=str,
)  # fmt: skip
def test_a_file_that_says_impossible_things_of_its_guard_is_refused(facts: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(FileError, match="Expected metadata as `Guard.export` writes it"):
        Model.load(write_graph(tmp_path / "g.onnx", **facts))


@pytest.mark.parametrize(
    "body", [b"[]," * 2_600_000, b"{}," * 2_600_000, b"0," * 4_000_000, b'"",' * 2_600_000, b"[" * 8_000_000]
)
def test_bodies_of_more_values_than_rows_have_are_refused_before_they_are_parsed(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json, "loads", lambda *args, **options: pytest.fail("parsed"))
    with pytest.raises(RequestError, match="Expected at most 4096 rows, but the body has") as refused:
        parse_inputs("application/json", b'{"inputs": [' + body, [InputSpec("x", (3,), np.float32)], 4096)
    assert refused.value.status == 413


@pytest.mark.parametrize("shape", [(), (3,), (None,), (2, 3, 2), (None, 2)])
def test_as_many_rows_as_are_allowed_are_never_too_many_values(shape: tuple[int | None, ...]) -> None:
    x = np.zeros((500, *(4 if size is None else size for size in shape)))
    body = json.dumps({"inputs": x.tolist()}, indent=1).encode()
    spec = InputSpec("x", shape, np.float32)
    assert parse_inputs("application/json", body, [spec], 500)["x"].shape == x.shape
    if shape == (3,):
        names = ["a[0],{", "[[[[,,,,{{{{", "c"]
        body = json.dumps({"rows": [dict.fromkeys(names, 0)] * 500}).encode()
        assert parse_inputs("application/json", body, [spec], 500, names)["x"].shape == x.shape


def test_health_is_answered_while_long_bodies_are_parsed_and_long_responses_written(
    served: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of both waits until /health was answered: on the event loop that would never be."""
    started, answered = threading.Event(), threading.Event()

    def waiting(function: Any) -> Any:
        def call(*args: Any) -> Any:
            started.set()
            assert answered.wait(20), "/health was not answered"
            return function(*args)

        return call

    monkeypatch.setattr(application, "SMALL", 1000)
    with TestClient(create_app(served, Limits())) as client, ThreadPoolExecutor(1) as pool:
        for name in ("parse_inputs", "_to_json"):
            started.clear()
            answered.clear()
            with monkeypatch.context() as patch:
                patch.setattr(application, name, waiting(getattr(application, name)))
                response = pool.submit(client.post, "/score", json={"inputs": 900 * [[0, 1, 2]]})
                assert started.wait(20)
                assert client.get("/health").json()["status"] == "ok"
                answered.set()
                assert response.result(20).json()["score"] == 900 * [3.0]


def test_numbers_that_are_not_finite_are_null_in_every_part_of_a_response(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "SMALL", 4)
    values = np.arange(22.0).reshape(11, 2)
    values[7] = np.inf, np.nan
    model = Model(None, (), ("score", "terms"), np.inf, terms=("a", 'quo"ted'))
    written = json.loads(application._to_json({"score": values[:, 0], "terms": values}, model))
    columns = [[None if row == 7 else float(value) for row, value in enumerate(column)] for column in values.T]
    assert written == {"score": columns[0], "terms": {"a": columns[0], 'quo"ted': columns[1]}, "threshold": None}


def test_a_mistake_of_the_server_is_a_sentence_counted_as_500_and_a_traceback_in_the_log(
    served: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(application, "parse_inputs", lambda *args: {}["nothing"])
    with TestClient(create_app(served, Limits())) as client:
        failed = client.post("/score", json={"inputs": [[1, 2, 3]]})
        assert (failed.status_code, failed.json()["detail"]) == (500, UNEXPECTED)
        metrics = client.get("/metrics").text
    assert 'offmap_requests_total{code="500"} 1.0' in metrics
    assert 'code="200"' not in metrics
    assert [record.exc_info is not None for record in caplog.records if record.levelno == logging.ERROR] == [True]


def test_lines_of_the_log_cannot_be_forged() -> None:
    record = logging.LogRecord("offmap.serve", logging.INFO, "", 0, "GET /\nFAKE \x1b[1m 200", None, None)
    assert TextFormatter().format(record).endswith(" INFO GET /\\nFAKE \\x1b[1m 200")


@pytest.mark.parametrize("rows", [None, 20, 100, 1000])
@pytest.mark.parametrize("n", [1, 3, 10, 100, 1000])
def test_the_alarm_begins_where_sound_rows_have_no_chance(n: int, rows: int | None) -> None:
    """More than so many of n are flagged with a chance of 1e-5 at most, as few as possible: exact for exchangeable rows."""
    above = None if rows is None else int(0.05 * (rows + 1))
    law = stats.binom(n, 0.05) if rows is None or above is None else stats.betabinom(n, above, rows + 1 - above)
    most = alert_count(n, 0.05, rows)
    assert law.sf(most) <= monitoring.ALARM_CHANCE * (1 + 1e-6)
    assert most == 0 or law.sf(most - 1) > monitoring.ALARM_CHANCE


def test_a_share_far_above_the_promise_is_an_alarm_and_one_near_it_is_none(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "offmap.serve")
    monitor = Monitor(Model(None, (), (), 0.0, false_alarms=0.05, calibration_rows=1000))

    def count(flagged: int, rows: int = 1000) -> bool:
        ood = np.arange(rows) < flagged
        monitor.count_rows({"score": ood.astype(float), "ood": ood})
        return monitor.alarm

    assert [count(70), count(188), count(188), count(60)] == [False, True, True, False]
    assert caplog.messages == [
        "Alarm on: 18.8 % of the latest 1000 rows are off the map, more than 9.9 %.",
        "Alarm off: 6.0 % of the latest 1000 rows are off the map.",
    ]
    text = generate_latest(monitor.registry).decode()
    assert "offmap_false_alarms 0.05" in text
    assert f"offmap_alert_share {monitor.alert_share}" in text


def test_short_responses_are_not_held_back() -> None:
    with listen("127.0.0.1", 0) as found:
        assert found.proto == socket.IPPROTO_TCP  # asyncio asks for this before it sets TCP_NODELAY


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
NESTED = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2))
ROWS = st.lists(st.lists(st.floats(width=32) | st.integers() | NESTED, min_size=3, max_size=3), max_size=6)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(
    body=st.binary(max_size=80)
    | st.binary(max_size=80).map(b"\x93NUMPY".__add__)
    | NESTED.map(lambda value: json.dumps(value).encode())
    | (ROWS | NESTED).map(lambda rows: json.dumps({"inputs": rows}).encode()),
    kind=st.sampled_from(["application/json", "application/x-npy", "text/plain", ""]),
)
def test_whatever_comes_is_an_array_of_the_right_form_or_a_refusal(body: bytes, kind: str) -> None:
    def results() -> tuple[object, ...]:
        try:
            made = parse_inputs(kind, body, [InputSpec("x", (3,), np.float32)], 4)["x"]
        except RequestError as refused:
            return refused.status in (413, 415, 422), refused.reason.startswith("Expected")
        return made.shape[1:] == (3,) and len(made) in range(1, 5), made.dtype == np.float32 and bool(np.isfinite(made).all())

    assert results() == (True, True)


def test_whole_numbers_past_every_float_are_refused() -> None:
    body = b'{"inputs": [[1, 2, ' + b"9" * 4000 + b"]]}"
    with pytest.raises(RequestError, match="Expected finite numbers in `x`"):
        parse_inputs("application/json", body, [InputSpec("x", (3,), np.float32)], 4)


def test_a_null_is_no_number_unless_values_may_be_missing() -> None:
    body = b'{"inputs": {"x": [[1, null, 3]], "k": [[2, 2]]}}'
    specs = [InputSpec("x", (3,), np.float32, True), InputSpec("k", (2,), np.int64)]
    np.testing.assert_array_equal(parse_inputs("application/json", body, specs, 4)["x"], [[1, np.nan, 3]])
    with pytest.raises(RequestError, match="Expected whole numbers in `k`"):
        parse_inputs("application/json", body.replace(b"[[2, 2]]", b"[[2, null]]"), specs, 4)
    with pytest.raises(RequestError, match="Expected numbers in `x`"):
        parse_inputs("application/json", b'{"inputs": [[1, null, 3]]}', [InputSpec("x", (3,), np.float32)], 4)


def test_an_address_that_is_taken_is_refused() -> None:
    with listen("127.0.0.1", 0) as taken, pytest.raises(ConfigError, match="Pass another --host or --port"):
        listen("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize(
    ("words", "variable", "message"),
    [
        ([], "", "Expected a token in --token or OFFMAP_TOKEN, but it is empty. Set another, or unset it to ask for none."),
        (["--token", ""], None, "but it is empty"),
        (["--token", "a b"], None, "but it has spaces"),
        (["--no-token"], "x", "Expected a token, or --no-token, but got both"),
        (
            ["--host", "0.0.0.0"],
            None,
            "Expected a token to listen on 0.0.0.0, which other machines can reach",
        ),
        (["--host", "::"], None, "Expected a token to listen on ::"),
        (["--host", "0.0.0.0", "--no-token"], None, "there is none at nothing.onnx"),
        (["--host", "0.0.0.0"], "x", "there is none at nothing.onnx"),
        (["--host", "::1"], None, "there is none at nothing.onnx"),
        (["--host", "localhost"], None, "there is none at nothing.onnx"),
    ],
)
def test_who_may_ask_is_said_before_the_server_is_public(
    words: list[str], variable: str | None, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OFFMAP_TOKEN", raising=False)
    if variable is not None:
        monkeypatch.setenv("OFFMAP_TOKEN", variable)
    monkeypatch.setattr("offmap.serve.logs.start_logging", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["offmap", "serve", "nothing.onnx", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == (1 if "nothing" in message else 2)
    assert message in capsys.readouterr().err


def test_the_command_says_what_it_cannot_serve(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("offmap.serve.logs.start_logging", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["offmap", "serve", "nothing.onnx"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == "offmap: Expected a file that `Guard.export` wrote, but there is none at nothing.onnx.\n"
