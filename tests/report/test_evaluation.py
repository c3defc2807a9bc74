"""The page of an evaluation as a file: self-contained, escaped, bounded, whole; and its words and numbers against slow counts."""

from __future__ import annotations

import io
import json
import math
import pickle
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

import offmap
from offmap.assessment import KINDS, Assessment, Shift
from offmap.errors import FileError
from offmap.metrics import auroc
from offmap.report import page as page_module
from offmap.report.assessment import describe_assessment
from offmap.report.curves import curves, risk_curve, roc, score_axis, thin, to_json
from offmap.report.evaluation import as_image, embed_json, headline, percent, png, verdict, write_page
from pages import check_page
from trained import classes, classifier, inputs, quick, regression, regressor

HOSTILE = "</script><script>alert(1)</script><b>\"'&\u2028\u2029\ud800"


class First:
    """Scores by the first feature."""

    def __init__(self, threshold: float | None = None) -> None:
        self.threshold = threshold

    def score(self, x: Tensor) -> Tensor:
        return x[:, 0]


class Backwards(First):
    """In-distribution ones are most OOD."""

    def score(self, x: Tensor) -> Tensor:
        return -x[:, 0]


class LookedUp(First):
    """Scores by row."""

    def __init__(self, threshold: float | None, scores: Tensor) -> None:
        super().__init__(threshold)
        self.scores = scores

    def score(self, x: Tensor) -> Tensor:
        return self.scores[x[:, 0].long()]


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None]


def numbers(text: str) -> dict:
    """The page's data, read strictly."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(found[1], parse_constant=refuse)


@pytest.fixture(scope="module")
def guard() -> offmap.Guard:
    return quick(regressor(), regression(60, 0), regression(60, 1), calibration=regression(99, 2))


@pytest.fixture(scope="module")
def evaluation(guard) -> offmap.Evaluation:
    return offmap.evaluate(guard, regression(50, 3), {"far": 5 * inputs(30, 5), "near": inputs(40, 6)})


def test_the_page_is_self_contained_and_whole(evaluation, tmp_path):
    path = offmap.write_page(evaluation, tmp_path / "page.html", title="A & B", columns=["a", "b", "c"])
    text = path.read_text(encoding="utf-8")
    page = check_page(text, scripts=True)
    assert page.tags["script"] == 2
    assert "<title>A &amp; B</title>" in text
    assert "Clipping the weights is left out: the inputs are more than two numbers" in text
    assert {"scores-and-threshold", "risk-and-coverage", "reliability", "the-model-summarised"} <= set(page.ids)
    assert "<td>gaussian</td>" not in text
    assert '<th scope="row">0.weight</th>' in text
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


# ---------------------------------------------------------------------------------------------- what a guard can see


def assessment_section(text: str) -> str:
    return re.search(r'<section id="what-this-guard-can-see".*?</section>', text, re.DOTALL)[0]


def test_a_page_tells_what_a_guard_can_see(evaluation, guard, tmp_path):
    section = assessment_section(write_page(evaluation, tmp_path / "page.html").read_text(encoding="utf-8"))
    assessment = guard.assess()
    for kind, shifts in assessment.kinds().items():
        row = re.search(rf'<tr><th scope="row">{KINDS[kind]}</th>(.*?)</tr>', section)[1]
        auroc, flagged = (sum(getattr(s, name) for s in shifts) / len(shifts) for name in ("auroc", "flagged"))
        shown = [float(number) for number in re.findall(r"([\d.]+)\u00a0%", row)][:3]
        assert shown == pytest.approx([auroc, flagged, min(s.auroc for s in shifts)], abs=0.5)
        widths = [float(width) for width in re.findall(r"width: ([\d.]+)%", row)]
        assert widths == pytest.approx([max(0.0, 2 * auroc - 100), flagged], abs=0.06)
    blind = assessment.blind()
    assert f"Not reliably seen: {len(blind)} of {len(assessment.shifts)} shifts" in section
    assert f"<summary>{len(blind) - 6} more</summary>" in section
    assert section.count("<li>") == len(blind)
    for name, weight in assessment.weights.items():
        row = re.search(rf'<tr><th scope="row">{name}</th>(.*?)</tr>', section)[1]
        assert float(re.search(r"([\d.]+)\u00a0%", row)[1]) == pytest.approx(100 * weight, abs=0.5)
    assert "ranks errors" not in section  # validation rows are too few to tell


def test_a_term_that_ranks_errors_much_better_is_said_in_bold():
    shifts = [Shift("beyond", "the end", 99.0, 80.0, {"inputs": 90.0, "energy": 70.0})]
    errors = {"inputs": -0.1, "energy": 0.6, "score": 0.2}
    text = describe_assessment(Assessment(shifts, {"inputs": 0.75, "energy": 0.25}, errors, 0.05))
    assert "All shifts that were tried are seen reliably." in text
    assert "The score ranks the model's errors with correlation +0.20. <b>The term 'energy' ranks them much better" in text
    assert "<td>−0.10</td>" in text
    text = describe_assessment(Assessment(shifts, {"inputs": 0.75, "energy": 0.25}, errors | {"energy": 0.25}, 0.05))
    assert "<b>The term" not in text


def test_an_assessment_of_nothing_says_so():
    text = describe_assessment(Assessment([], {"inputs": 1.0}, {}, 0.05))
    assert "Nothing was tried: there are too few training rows to leave some out." in text
    assert text.count("<table") == 1


def test_scorers_that_cannot_be_assessed_are_told_apart_or_leave_the_section_out(guard, tmp_path):
    paper = quick(regressor(), regression(60, 0), regression(60, 1), score="paper")
    sets = {"far": 5 * inputs(30, 5)}
    both = offmap.evaluate({"ours": guard, "paper": paper, "first": First()}, regression(50, 3), sets)
    section = assessment_section(write_page(both, tmp_path / "page.html").read_text(encoding="utf-8"))
    assert section.count("Only guards whose score compares inputs with training rows") == 2
    text = write_page(offmap.evaluate(paper, regression(50, 3), sets), tmp_path / "page.html").read_text(encoding="utf-8")
    assert "What this guard can see is left out: only guards whose score compares inputs with training rows" in text
    assert '<section id="what-this-guard-can-see"' not in text


def test_hostile_groups_and_columns_are_words(guard, tmp_path):
    named = replace(guard, about={"inputs": [HOSTILE, "b", "c"]})
    made = offmap.evaluate(named, regression(50, 3), {"far": 5 * inputs(30, 5)})
    page = check_page(write_page(made, tmp_path / "page.html").read_text(encoding="utf-8"), scripts=True)
    assert page.tags["script"] == 2
    text = describe_assessment(Assessment([Shift("group", HOSTILE, 50.0, 0.0)], {HOSTILE: 1.0}, {}, 0.05))
    assert "<script" not in text


def test_errors_of_ood_sets_with_targets_stand_among_all_numbers(guard, tmp_path):
    x, y = regression(40, 6)
    made = offmap.evaluate(guard, regression(50, 3), {"far": 5 * inputs(30, 5), "shifted": (x + 1, y)})
    text = write_page(made, tmp_path / "page.html").read_text(encoding="utf-8")
    check_page(text, scripts=True)
    rows = {row["set"]: row for row in made.rows}
    assert f"<td>{page_module.format_number(rows['shifted']['aurc'])}</td>" in text


def test_a_page_is_the_same_every_time(evaluation, tmp_path):
    one, two = (write_page(evaluation, tmp_path / name).read_bytes() for name in ("a.html", "b.html"))
    assert one == two


def test_hostile_words_do_not_leave_their_place(tmp_path):
    data = (column(1, 2, 3, 4), torch.tensor([0, 1, 0, 1]))
    made = offmap.evaluate({HOSTILE: First(), "b": First()}, data, {f"far {HOSTILE}": column(3, 5)})
    path = write_page(made, tmp_path / "page.html", title=HOSTILE, columns=[HOSTILE], classes=[HOSTILE, "c"])
    text = path.read_text(encoding="utf-8")
    page = check_page(text, scripts=True)
    assert page.tags["script"] == 2
    assert page.tags["b"] == 0
    assert numbers(text)["scorers"][0]["name"] == HOSTILE


@given(st.text())
def test_embedded_words_are_read_back(word):
    text = embed_json({"word": word})
    assert json.loads(text) == {"word": word}
    assert text.isascii()
    assert not set("<>&") & set(text)


def test_what_json_has_no_word_for_is_refused():
    with pytest.raises(ValueError, match="not JSON compliant"):
        embed_json([math.nan])


@pytest.mark.parametrize(
    ("id_scores", "ood_scores", "threshold"),
    [
        ((1, 1, 1), (1, 1), None),
        ((1, 2, math.inf), (math.inf, math.inf), 1.5),
        ((math.inf, math.inf), (math.inf,), math.inf),
        ((-3e30, 0, 2), (1e-30, 5e35), 0.0),
        ((1e-30, 1e-20, 1.0), (2.0,), 0.5),
        ((0, 0, 0, 0), (1, 2), 0.0),
        ((5,), (7,), -20.0),
    ],
)
def test_scores_of_any_kind_make_a_page(id_scores, ood_scores, threshold, tmp_path):
    # inputs must be finite, scores need not be: they are looked up
    scores, cut = torch.tensor([*id_scores, *ood_scores], dtype=torch.float32), len(id_scores)
    places = torch.arange(float(len(scores)))[:, None]
    made = offmap.evaluate(LookedUp(threshold, scores), (places[:cut], torch.zeros(cut)), {"far": places[cut:]})
    text = write_page(made, tmp_path / "page.html").read_text(encoding="utf-8")
    (study,) = numbers(text)["scorers"]
    for found, values in zip(study["sets"], (id_scores, ood_scores), strict=True):
        assert sum(found["bins"]) == pytest.approx(1, abs=1e-3)
        assert found["over"] == sorted(found["over"], reverse=True)
        assert found["rows"] == len(values)
    finite = [value for value in study["thresholds"] if value is not None]
    assert finite == sorted(finite)
    if threshold is not None and math.isfinite(threshold):
        assert study["own"]
        assert study["sets"][0]["over"][study["start"]] == sum(np.float32(v) > threshold for v in id_scores)


def test_a_million_rows_make_a_small_page(tmp_path):
    noise = torch.Generator().manual_seed(0)
    x = torch.randn(1_000_000, 1, generator=noise)
    made = offmap.evaluate(First(2.0), (x, torch.zeros(len(x))), {"far": x + 3})
    path = write_page(made, tmp_path / "page.html")
    assert path.stat().st_size < 150_000
    (study,) = numbers(path.read_text(encoding="utf-8"))["scorers"]
    assert study["sets"][1]["over"][study["start"]] == int((x + 3 > 2).sum())


def test_images_keep_to_their_budget(tmp_path):
    images = torch.rand(20, 3, 200, 300, generator=torch.Generator().manual_seed(0))  # noise does not compress
    scorers = {f"scorer {i}": _Flat() for i in range(4)}
    made = offmap.evaluate(scorers, (images, torch.zeros(20)), {f"set {i}": images for i in range(5)})
    assert write_page(made, tmp_path / "page.html").stat().st_size < 2_000_000


class _Flat:
    def score(self, x: Tensor) -> Tensor:
        return x.flatten(1).mean(1)


def test_thresholds_count_what_lies_above_them(evaluation):
    study = curves(evaluation, "guard")
    assert study["thresholds"] == sorted(study["thresholds"])
    for found in study["sets"]:
        scores = evaluation.scores["guard"][found["name"]].tolist()
        for step in range(0, 401, 40):
            t = study["thresholds"][step]
            low, high = (sum(s > t + sign * 1e-5 * abs(t) for s in scores) for sign in (1, -1))
            assert low <= found["over"][step] <= high


def test_risk_at_a_threshold_is_the_error_of_what_is_answered():
    scores, losses = np.array([3.0, 1.0, 2.0, 4.0]), np.array([1.0, 0.0, math.nan, 9.0])
    found = to_json(risk_curve(scores, losses, np.array([0.0, 1.0, 3.5, 9.0]), "regression"))
    assert found["at"] == [None, 0.0, pytest.approx(math.sqrt(0.5), abs=1e-4), pytest.approx(math.sqrt(10 / 3), abs=1e-3)]
    assert found["answered"] == pytest.approx([0, 1 / 3, 2 / 3, 1], abs=1e-6)
    assert found["y"][-1] == found["at"][-1]
    assert risk_curve(scores, np.full(4, math.nan), scores, "regression") is None


@given(st.lists(st.floats(0, 1), min_size=2, max_size=400).map(sorted), st.integers(2, 50))
def test_thinned_curves_are_short_and_keep_their_ends(along, count):
    places = thin(np.array(along), count)
    assert places[0] == 0
    assert places[-1] == len(along) - 1
    assert len(places) <= max(count, 1) + 2
    assert places == sorted(set(places))


@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=40),
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40),
)
def test_an_axis_rises_and_holds_nearly_all_scores(id_scores, ood_scores):
    _, along = score_axis([np.array(id_scores), np.array(ood_scores)])
    assert (np.diff(along) >= 0).all()
    scores = np.array(id_scores + ood_scores)
    inside = (scores >= along[0] - 1e-9 * abs(along[0])) & (scores <= along[-1] + 1e-9 * abs(along[-1]))
    assert inside.sum() >= len(scores) - 4  # the ends of every set may lie outside


@pytest.mark.parametrize("ties", [False, True])
def test_area_under_the_roc_curve_is_the_auroc(ties):
    rng = np.random.default_rng(0)
    id_scores, ood_scores = rng.normal(size=80), rng.normal(1, size=60)
    if ties:
        id_scores, ood_scores = id_scores.round(), ood_scores.round()
    alarms, catches = roc(id_scores, ood_scores)
    area = float(auroc(torch.from_numpy(id_scores), torch.from_numpy(ood_scores)))
    assert np.trapezoid(catches, alarms) == pytest.approx(area, abs=1e-12)


def test_roc_curve_runs_from_nothing_to_everything():
    alarms, catches = roc(np.array([0.0, 1.0]), np.array([np.inf, 0.5]))
    assert (alarms[0], catches[0], alarms[-1], catches[-1]) == (0, 0, 1, 1)
    assert (np.diff(alarms) >= 0).all()
    assert (np.diff(catches) >= 0).all()


def test_a_verdict_says_what_was_seen(evaluation, guard):
    words = verdict(evaluation, "guard")
    scores = evaluation.scores["guard"]
    shares = {name: 100 * float((s > guard.threshold).double().mean()) for name, s in scores.items()}
    stated = {name: float(value) for value, name in re.findall(r"\*\*([\d.]+)\s%\sof “?(far|near|in-distribution)", words)}
    assert stated == {"far": pytest.approx(shares["far"], abs=0.5), "near": pytest.approx(shares["near"], abs=0.5),
                    "in-distribution": pytest.approx(shares["test"], abs=0.5)}  # fmt: skip
    assert "The hardest to tell apart is “near”." in words
    assert f"an RMSE of {evaluation.rows[0]['rmse']:.3g}" in words
    assert headline(evaluation) == "This guard cannot tell “near” from in-distribution data."


def test_a_verdict_calls_intervals_that_fail_by_that_name(guard):
    x, y = regression(200, 3)
    far = {"far": 5 * inputs(30, 5)}
    sound = verdict(offmap.evaluate(guard, (x, y), far), "guard")
    assert "conformal intervals contain the target for" in sound
    assert "fail" not in sound
    shifted = verdict(offmap.evaluate(guard, (x, y + 0.5), far), "guard")
    assert "**These intervals fail: that is fewer than 95 %, beyond chance**" in shifted
    seen = verdict(offmap.evaluate(quick(regressor(), regression(200, 0)), (x, y), far), "guard")
    assert "**It is uncalibrated**" in seen
    assert "**It has no conformal intervals**: the model was trained on the rows that calibrated it." in seen


def test_a_verdict_over_several_scorers_names_the_best():
    x = (column(1, 2, 3, 4), torch.zeros(4))
    far = {"far": column(5, 6), "farther": column(7, 8)}
    made = offmap.evaluate({"backwards": Backwards(), "first": First(2.0)}, x, far)
    assert headline(made) == "Of 2 scorers, “first” does best: it tells both OOD sets from in-distribution data reliably."
    assert "**50\u00a0% of in-distribution rows** by mistake" in verdict(made, "first")
    assert "no threshold of its own" in verdict(made, "backwards")


def test_a_classifier_shows_names_of_classes(tmp_path):
    sorter = quick(classifier(), classes(60, 0), classes(60, 1))
    made = offmap.evaluate(sorter, classes(50, 3), {"far": 5 * inputs(30, 5)})
    text = write_page(made, tmp_path / "page.html", classes=["ant", "bee", "cat"]).read_text(encoding="utf-8")
    assert re.search(r"<td>(ant|bee|cat)</td><td>(ant|bee|cat) \(\d+\s%\)</td>", text)
    assert numbers(text)["scorers"][0]["kind"] == "classification"


def test_dicts_of_inputs_are_shown_by_key(tmp_path):
    class Tokens:
        def score(self, x):
            return x["ids"].float().mean(1)

    ids = torch.arange(24).reshape(4, 6)
    made = offmap.evaluate(Tokens(), {"ids": ids, "labels": torch.tensor([0, 1, 0, 1])}, {"far": {"ids": ids + 50}})
    text = write_page(made, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<td>18 19 20 21 22 23</td>" in text


def test_a_pickled_evaluation_leaves_its_scorers_behind_and_still_makes_a_page(evaluation, tmp_path):
    again = pickle.loads(pickle.dumps(evaluation))
    assert again.detectors == {}
    assert again.rows == evaluation.rows
    text = write_page(again, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "it makes no parameters random" in text
    assert numbers(text)["scorers"][0]["risk"] == numbers(page_text(evaluation, tmp_path))["scorers"][0]["risk"]


def page_text(evaluation, folder) -> str:
    return write_page(evaluation, folder / "other.html").read_text(encoding="utf-8")


def test_a_page_without_a_place_is_refused_before_any_work(tmp_path):
    with pytest.raises(FileError, match="the folder .*/no does not exist. Create it"):
        write_page(None, tmp_path / "no" / "page.html")


@pytest.mark.parametrize(
    ("share", "text"), [(0.5, "50"), (0.0423, "4.2"), (0.99996, "> 99.9"), (1e-5, "< 0.1"), (1.0, "100"), (0, "0")]
)
def test_a_share_is_never_zero_or_all_unless_it_is(share, text):
    assert percent(share) == f"{text}\u00a0%"


def test_flat_rows_are_folded_to_images():
    assert as_image(torch.zeros(1, 6), (2, 3)).shape == (2, 3, 1)
    assert as_image(torch.zeros(1, 3, 4, 5), None).shape == (4, 5, 3)
    assert as_image(torch.zeros(1, 6), None) is None
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(png(pixels)))), pixels)


def test_numbers_of_a_page_have_few_digits_and_what_json_cannot_hold_is_none():
    found = to_json({"auroc": np.array([1 / 3, math.inf]), "rows": 3, "deep": [(2 / 3, torch.tensor(0.1)), "a", None, True]})
    assert found == {"auroc": [0.33333, None], "rows": 3, "deep": [[0.6667, 0.1], "a", None, True]}
