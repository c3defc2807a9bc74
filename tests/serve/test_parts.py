"""What the server is made of, without a server."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import generate_latest

from offmap import cli
from offmap.errors import ConfigError, FileError
from offmap.export.onnx import add_checksum
from offmap.serve.app import Limits, Monitor, listen
from offmap.serve.model import Batcher, Model
from offmap.serve.parsing import Arrays, InputSpec, RequestError, parse_inputs


def doubled(inputs: Arrays) -> Arrays:
    """A model that fails on negative numbers."""
    if (inputs["x"] < 0).any():
        raise ValueError("negative")
    return {"score": 2 * inputs["x"]}


def test_requests_that_wait_are_run_together_and_one_that_fails_fails_alone() -> None:
    async def ask() -> tuple[list[Arrays | BaseException], int]:
        batcher = Batcher(doubled, together=10)
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
        batcher = Batcher(doubled, together=10, max_waiting=4)
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
    monitor = Monitor(Model(None, (), (), 0.0, ()), Limits(window=7, alert=0.5), clock=lambda: now[0])
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
    for name in ("words", "other"):
        (tmp_path / f"{name}-sealed.onnx").write_bytes(add_checksum((tmp_path / f"{name}.onnx").read_bytes()))
    for name, message in (
        ("none.onnx", "there is none"),
        ("words.onnx", "as `Guard.export` wrote it, but .*words.onnx is damaged, changed or another: its checksum does not fit"),
        ("other.onnx", "other.onnx is damaged, changed or another"),
        ("words-sealed.onnx", "cannot read"),
        ("other-sealed.onnx", "is another ONNX model"),
    ):
        with pytest.raises(FileError, match=message):
            Model.load(tmp_path / name)


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


def test_an_address_that_is_taken_is_refused() -> None:
    with listen("127.0.0.1", 0) as taken, pytest.raises(ConfigError, match="Pass another --host or --port"):
        listen("127.0.0.1", taken.getsockname()[1])


def test_the_command_says_what_it_cannot_serve(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["offmap", "serve", "nothing.onnx"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == "offmap: Expected a file that `Guard.export` wrote, but there is none at nothing.onnx.\n"
