"""The page of an evaluation in a real browser: what the reader moves, and what the numbers then say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import offmap
from browsing import browser, open_page, overlapping, skipped_levels
from offmap.report.curves import CLIPS
from trained import model

HOSTILE = "</script><script>window.hit=1</script><img src=x onerror=window.hit=1>\"'&\u2028"

OWN = " (the guard's)"


class Norm:
    """How far from the origin; no threshold, no prediction."""

    def score(self, x: Tensor) -> Tensor:
        return x.flatten(1).norm(dim=1)


def line(n: int, seed: int) -> tuple[Tensor, Tensor]:
    noise = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 1, generator=noise) - 0.5
    return x, (3 * x).sin()[:, 0] + 0.1 * torch.randn(n, generator=noise)


def plane(n: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] * x[:, 1] > 0).long()


@pytest.fixture(scope="module")
def regression() -> offmap.Evaluation:
    x, y = line(200, 7)
    net = model(x, y[:, None])
    options: dict[str, Any] = {"steps": 60, "check_every": 10, "draws": 12, "risk_draws": 8, "score": "paper", "progress": False}
    guard = offmap.fit(net, line(80, 0), line(60, 1), solver="sgd", lr=0.1, **options)
    return offmap.evaluate(guard, line(150, 2), {"left": -1.5 + line(90, 3)[0], "far right of it": 2.5 + line(70, 4)[0]})


@pytest.fixture(scope="module")
def classification() -> offmap.Evaluation:
    x, y = plane(200, 7)
    net = model(x, 6.0 * torch.nn.functional.one_hot(y, 2), hidden=24)
    guard = offmap.fit(net, plane(80, 0), plane(60, 1), solver="closed-form", draws=8, risk_draws=8)
    return offmap.evaluate(
        {HOSTILE: guard, "norm": Norm()}, plane(120, 2), {f"far {HOSTILE}": 6 * plane(90, 3)[0], "near": plane(50, 4)[0]}
    )


@pytest.fixture(scope="module")
def pages(regression, classification, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    noise = torch.Generator().manual_seed(0)
    images = torch.rand(30, 3, 9, 9, generator=noise)
    image_evaluation = offmap.evaluate({"norm": Norm()}, (images, torch.arange(30) % 3), {"bright": 2 * images})
    return {
        "regression": offmap.write_page(regression, folder / "regression.html"),
        "classification": offmap.write_page(
            classification, folder / "classification.html", title=HOSTILE, columns=[HOSTILE, "b"], classes=[HOSTILE, "other"]
        ),
        "images": offmap.write_page(image_evaluation, folder / "images.html", classes=["a", "b", "c"]),
    }


@pytest.fixture(scope="module")
def chromium():
    with browser() as running:
        yield running


def count_flagged(tab: Any) -> dict[str, tuple[int, int]]:
    """Rows flagged and rows in all, by set, as the table says."""
    rows = tab.evaluate("[...document.querySelectorAll('#flagged tbody tr')].map(r => [...r.children].map(c => c.textContent))")
    counts = {name: tuple(map(int, words.split(" of "))) for name, _, words in rows}
    assert [share for _, share, _ in rows] == [f"{100 * over / n:.1f}\u00a0%" for over, n in counts.values()]
    return counts


def study(tab: Any) -> dict[str, Any]:
    return tab.evaluate("JSON.parse(document.getElementById('data').textContent).scorers[state.scorer]")


def check_counts(tab: Any, scores: dict[str, Tensor]) -> None:
    """The table's counts are those of the scores above the slider's threshold, which the page has in six digits."""
    threshold = study(tab)["thresholds"][int(tab.get_by_role("slider", name="Threshold").input_value())]
    margin = 1e-5 * abs(threshold)
    for name, (over, rows) in count_flagged(tab).items():
        assert rows == len(scores[name])
        assert int((scores[name] > threshold + margin).sum()) <= over <= int((scores[name] > threshold - margin).sum())


def test_the_threshold_starts_at_the_guards_own(chromium, pages, regression):
    guard = regression.detectors["guard"]
    with open_page(chromium, pages["regression"]) as tab:
        expected = {n: (int((s > guard.threshold).sum()), len(s)) for n, s in regression.scores["guard"].items()}
        assert count_flagged(tab) == expected
        words = tab.inner_text("#rates")
        assert words.startswith(f"Threshold {float(f'{guard.threshold:.4g}'):g} (the guard's): false alarms on ")
        over, rows = expected["left"]
        assert f"{100 * over / rows:.1f}\u00a0% of left" in words


def test_the_threshold_moves_by_keyboard(chromium, pages, regression):
    scores = regression.scores["guard"]
    with open_page(chromium, pages["regression"]) as tab:
        slider = tab.get_by_role("slider", name="Threshold")
        slider.focus()
        seen = [count_flagged(tab)]
        for key in ("ArrowRight", "PageUp", "PageUp", "ArrowLeft", "PageDown", "ArrowLeft", "Home", "End"):
            before = tab.inner_text("#rates")
            slider.press(key)
            check_counts(tab, scores)
            assert tab.inner_text("#rates") != before
            assert slider.get_attribute("aria-valuetext") in tab.inner_text("#rates")
            seen.append(count_flagged(tab))
        assert len({str(counts) for counts in seen}) > 2
        assert all(over <= 0.01 * n + 1 for over, n in seen[-1].values())  # beyond the last tick there is next to nothing
        tab.get_by_role("button", name="Reset").click()
        assert count_flagged(tab) == seen[0]


def test_the_threshold_moves_by_mouse(chromium, pages, regression):
    with open_page(chromium, pages["regression"]) as tab:
        slider = tab.get_by_role("slider", name="Threshold")
        slider.scroll_into_view_if_needed()
        box, first = slider.bounding_box(), count_flagged(tab)
        start = box["x"] + 10 + (box["width"] - 20) * int(slider.input_value()) / 400
        tab.mouse.move(start, box["y"] + box["height"] / 2)
        tab.mouse.down()
        tab.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + box["height"] / 2, steps=5)
        tab.mouse.up()
        assert 300 < int(slider.input_value()) < 340
        check_counts(tab, regression.scores["guard"])
        assert count_flagged(tab) != first
        box = tab.locator("#plot-scores svg").bounding_box()
        tab.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 50)
        tab.mouse.down()
        tab.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 50, steps=4)
        tab.mouse.up()
        assert 90 < int(slider.input_value()) < 110
        check_counts(tab, regression.scores["guard"])


def test_the_line_of_the_figure_stands_above_the_thumb(chromium, pages):
    with open_page(chromium, pages["regression"]) as tab:
        slider = tab.get_by_role("slider", name="Threshold")
        box = slider.bounding_box()
        for key in ("Home", "End", "PageDown"):
            slider.press(key)
            thumb = box["x"] + 10 + (box["width"] - 20) * int(slider.input_value()) / 400
            line_box = tab.locator("#plot-scores .threshold").bounding_box()
            assert line_box["x"] + line_box["width"] / 2 == pytest.approx(thumb, abs=1.5)


def test_curves_follow_the_threshold(chromium, pages, regression):
    guard, (x, y) = regression.detectors["guard"], line(150, 2)
    error = (guard.predict(x).mean - y).square()
    scores = regression.scores["guard"]
    with open_page(chromium, pages["regression"]) as tab:
        slider = tab.get_by_role("slider", name="Threshold")
        slider.press("PageDown")
        check_counts(tab, scores)
        counts = count_flagged(tab)
        kept = scores["test"].argsort()[: counts["test"][1] - counts["test"][0]]
        words = re.search(
            r"At this threshold ([\d.]+)\u00a0% of the rows are answered, with RMSE ([\d.e−]+)\.", tab.inner_text("#plot-risk")
        )
        assert float(words[1]) == pytest.approx(100 * len(kept) / 150, abs=0.05)
        assert float(words[2]) == pytest.approx(error[kept].mean().sqrt().item(), rel=6e-3)
        ends = tab.evaluate("[marks.roc[0].X(0), marks.roc[0].X(1), marks.roc[0].Y(0), marks.roc[0].Y(1)]")
        for place, name in enumerate(("left", "far right of it")):
            ring = tab.locator("#plot-roc circle").nth(place)
            across = (float(ring.get_attribute("cx")) - ends[0]) / (ends[1] - ends[0])
            up = (float(ring.get_attribute("cy")) - ends[2]) / (ends[3] - ends[2])
            assert across == pytest.approx(counts["test"][0] / 150, abs=1e-6)
            assert up == pytest.approx(counts[name][0] / counts[name][1], abs=1e-6)


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_the_clip_slider_shows_the_predictions_at_every_clip(kind, chromium, pages, request):
    evaluation = request.getfixturevalue(kind)
    guard = next(iter(evaluation.detectors.values()))
    clips = sorted({c for c in (*CLIPS, guard.clip) if c is not None}, reverse=True)
    with open_page(chromium, pages[kind]) as tab:
        if len(evaluation.scores) > 1:  # the page begins with the best scorer, which may be another
            tab.get_by_role("combobox", name="Scorer").select_option("0")
        slider = tab.get_by_role("slider", name="Clip")
        slider.press("Home")
        drawn = []
        for place, clip in enumerate([None, *clips]):
            if place:
                slider.press("ArrowRight")
            words = tab.inner_text("#clipped")
            assert words.startswith(f"Clip {'∞' if clip is None else f'{clip:.3g}'}{OWN if clip == guard.clip else ''}: median ")
            for name, points in evaluation.points.items():
                prediction = guard.predict(points.inputs, clip=clip)
                entropy = (
                    None if prediction.probs is None else -(prediction.probs * prediction.probs.clamp_min(1e-30).log()).sum(1)
                )
                value = (prediction.std if entropy is None else entropy).median().item()
                stated = words[: words.index(f" on {name}")].rsplit(" ", 1)[1].replace("−", "-")
                assert float(stated) == pytest.approx(value, rel=6e-3, abs=1e-9)
            drawn.append(tab.evaluate("(clipFrame.area || clipFrame.image).getAttribute(clipFrame.area ? 'd' : 'href')"))
        assert slider.input_value() == str(len(clips))
        assert len(set(drawn)) > len(drawn) // 2
        assert drawn[0] != drawn[-1]
        slider.scroll_into_view_if_needed()
        box = slider.bounding_box()
        tab.mouse.click(box["x"] + 11, box["y"] + box["height"] / 2)
        assert tab.inner_text("#clipped").startswith("Clip ∞")


def test_another_scorer_is_chosen_and_what_it_lacks_is_named(chromium, pages, classification):
    with open_page(chromium, pages["classification"]) as tab:
        for name in ("norm", HOSTILE, "norm"):
            tab.get_by_role("combobox", name="Scorer").select_option(str(list(classification.scores).index(name)))
            check_counts(tab, classification.scores[name])
        assert "This scorer makes no predictions." in tab.inner_text("#risk-and-coverage")
        assert "Only guards draw weights that can be clipped." in tab.inner_text("#clipping-the-weights")
        assert not tab.get_by_role("slider", name="Clip").is_visible()
        assert "95\u00a0% of in-distribution rows pass" in tab.inner_text("#rates")
        over, rows = count_flagged(tab)["test"]
        assert over <= 0.05 * rows < over + 1
        assert tab.locator("h3:visible").first.inner_text() == "In-distribution data: test"


def test_what_a_guard_can_see_is_shown_for_the_scorer_that_is_chosen(chromium, pages, classification):
    assessment = classification.detectors[HOSTILE].assess()
    for width in (1180, 390):
        with open_page(chromium, pages["classification"], width=width) as tab:
            menu, section = tab.get_by_role("combobox", name="Scorer"), tab.locator("#what-this-guard-can-see")
            menu.select_option("0")
            blind = assessment.blind()
            assert f"Not reliably seen: {len(blind)} of {len(assessment.shifts)} shifts" in section.inner_text()
            assert section.locator(".seen:visible").count() == 2
            # every bar is inside its cell, and no wider than its frame
            widths = "bars => bars.map(b => [b.firstChild, b, b.closest('td')].map(part => part.offsetWidth))"
            for filled, whole, cell in section.locator(".bar:visible").evaluate_all(widths):
                assert filled <= whole < cell
            if len(blind) > 6:
                section.locator("summary:visible").click()
            assert section.locator("li:visible").count() == len(blind)
            menu.select_option("1")
            assert "Only guards whose score compares inputs with training rows" in section.inner_text()
            assert section.locator(".seen:visible").count() == 0


def test_hostile_names_are_words(chromium, pages):
    with open_page(chromium, pages["classification"]) as tab:
        assert tab.evaluate("window.hit") is None
        assert tab.evaluate("document.querySelectorAll('img').length") == 0
        assert HOSTILE in tab.evaluate("[...document.querySelectorAll('#scorer option')].map(o => o.textContent)")
        assert f"far {HOSTILE}" in count_flagged(tab)
        assert tab.title() == HOSTILE
        assert HOSTILE in tab.evaluate("[...document.querySelectorAll('#lowest-and-highest-scores th')].map(o => o.textContent)")


def test_images_are_shown_with_words(chromium, pages):
    with open_page(chromium, pages["images"]) as tab:
        images = tab.evaluate("[...document.querySelectorAll('.images img')].map(i => [i.alt, i.naturalWidth, i.complete])")
        assert len(images) == 20
        assert all(width == 9 and done for _, width, done in images)
        assert re.fullmatch(r"Row \d+: score [\d.]+, is [abc]\.", images[0][0])
        assert "Clipping the weights is left out: only guards" in tab.inner_text("footer")


@pytest.mark.parametrize("name", ["regression", "classification", "images"])
def test_pages_fit_every_screen_and_labels_stand_apart(name, chromium, pages):
    for width in (1180, 390, 320):
        with open_page(chromium, pages[name], width=width) as tab:
            tab.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            assert overlapping(tab) == []
            assert skipped_levels(tab) == []


def test_turning_the_phone_draws_anew(chromium, pages):
    with open_page(chromium, pages["regression"], width=390) as tab:
        tab.set_viewport_size({"width": 844, "height": 390})
        tab.wait_for_selector("#plot-scores svg[viewBox^='0 0 8']")
        assert overlapping(tab) == []


def test_dark_and_light_follow_the_screen_until_chosen_otherwise(chromium, pages):
    def background(tab: Any) -> str:
        return tab.evaluate("getComputedStyle(document.body).backgroundColor")

    light, dark = "rgb(253, 253, 252)", "rgb(20, 23, 28)"
    for colours, first, second in (("light", light, dark), ("dark", dark, light)):
        with open_page(chromium, pages["regression"], colours=colours) as tab:
            button = tab.get_by_role("button", name="Dark colours")
            assert (background(tab), button.get_attribute("aria-pressed")) == (first, str(first == dark).lower())
            button.click()
            assert (background(tab), button.get_attribute("aria-pressed")) == (second, str(second == dark).lower())
            tab.emulate_media(color_scheme="dark" if colours == "light" else "light")
            assert background(tab) == second


@pytest.mark.parametrize("name", ["regression", "classification", "images"])
def test_everything_has_a_name_and_live_numbers_are_announced(name, chromium, pages):
    with open_page(chromium, pages[name]) as tab:
        unnamed = """[...document.querySelectorAll('[role=img], input, select, button, img')]
            .filter(e => !(e.getAttribute('aria-label') || e.alt || e.textContent.trim() || (e.labels && e.labels.length)))
            .map(e => e.outerHTML)"""
        assert tab.evaluate(unnamed) == []
        assert all(
            len(words) > 15
            for words in tab.evaluate("[...document.querySelectorAll('svg[role=img]')].map(e => e.getAttribute('aria-label'))")
        )
        assert tab.locator("output[aria-live=polite]").count() == (1 if name == "images" else 2)
        order = []
        for _ in range(30):
            tab.keyboard.press("Tab")
            order.append(tab.evaluate("document.activeElement.id"))
        assert order.index("theme") < order.index("threshold") < order.index("back")
        assert tab.evaluate("[...document.querySelectorAll('th')].every(h => h.scope)")
