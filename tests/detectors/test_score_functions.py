"""Every detector against a slow and obvious version of its definition, on a small trained model and on OOD inputs."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn

from offmap.data.image_spec import ImageSpec
from offmap.detectors.classifier import Activations, find_features
from offmap.detectors.gram import correlations
from offmap.detectors.msp import msp
from offmap.detectors.openmax import fit_weibull
from offmap.detectors.posthoc import DETECTORS, FitData, PostHocDetector, fit_detector
from offmap.detectors.react import percentile
from offmap.detectors.temperature import best_temperature
from offmap.errors import ConfigError, DataError
from trained import classes
from trained import classifier as trained_model

RANGE = ImageSpec(None, -1.0, 1.0, False)


@cache
def fit_data() -> FitData:
    classifier = find_features(trained_model(), classes(8)[0])
    (x, y), (other, other_y) = classes(300), classes(100, 1)
    batch = classifier.activations(x)
    return FitData(
        classifier,
        batch.features,
        batch.logits,
        y,
        classifier.activations(other),
        other_y,
        lambda: x.split(64),
        RANGE,
    )


@cache
def ood() -> Activations:
    return fit_data().classifier.activations(3 * classes(40, 2)[0] + 1)


def scores(method: str, **options: float) -> Tensor:
    return score(fit_detector(method, fit_data(), **options), ood())


def score(detector: PostHocDetector, batch: Activations) -> Tensor:
    return detector._score(batch)


def per_row(function, *columns: Tensor) -> Tensor:
    return torch.tensor([float(function(*row)) for row in zip(*(c.double() for c in columns), strict=True)])


def energy_of(logits) -> float:
    return -math.log(sum(math.exp(float(z)) for z in logits))


@pytest.mark.parametrize("temperature", [1.0, 7.0])
def test_msp_and_energy_are_their_sums_of_exponentials(temperature: float) -> None:
    def one_minus_most(z: Tensor) -> float:
        powers = [math.exp(float(v) / temperature) for v in z]
        return (sum(powers) - max(powers)) / sum(powers)

    z = ood().logits
    torch.testing.assert_close(scores("msp", temperature=temperature), per_row(one_minus_most, z))
    slow = per_row(lambda z: temperature * energy_of(z / temperature), z)
    torch.testing.assert_close(scores("energy", temperature=temperature), slow)


def test_a_confident_net_still_ranks_its_predictions() -> None:
    assert msp(torch.tensor([[60.0, 0.0]])) > msp(torch.tensor([[70.0, 0.0]])) > 0


def test_mls_and_entropy_are_theirs() -> None:
    z = ood().logits
    torch.testing.assert_close(scores("mls"), per_row(lambda z: -max(z.tolist()), z))
    slow = per_row(lambda z: sum(-p * math.log(p) for p in z.softmax(0).tolist() if p > 0), z)
    torch.testing.assert_close(scores("entropy"), slow, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("top", [2, 100])
def test_gen_sums_powers_of_the_largest_probabilities(top: int) -> None:
    def slow(z: Tensor) -> float:
        p = sorted(z.softmax(0).tolist(), reverse=True)
        return sum((q * (sum(p) - q)) ** 0.1 for q in p[:top])

    torch.testing.assert_close(scores("gen", top=top), per_row(slow, ood().logits), rtol=1e-3, atol=1e-5)


def test_the_temperature_has_the_lowest_validation_loss_of_a_fine_grid() -> None:
    z, y = fit_data().valid.logits.double(), fit_data().valid_labels
    grid = [math.exp(i / 200) for i in range(-800, 800)]
    best = min(grid, key=lambda t: float(F.cross_entropy(z / t, y)))
    assert best_temperature(z, y) == pytest.approx(best, rel=0.006)
    torch.testing.assert_close(scores("temperature"), scores("msp", temperature=best_temperature(z, y)))


def test_kl_matching_is_the_least_divergence_to_a_mean_prediction() -> None:
    k, p = fit_data(), fit_data().logits.double().softmax(1)
    means = [p[k.logits.argmax(1) == c].mean(0) for c in range(3)]

    def slow(z: Tensor) -> float:
        q = z.softmax(0)
        return min(sum(float(a * (a / b).log()) for a, b in zip(q, m, strict=True) if a > 0) for m in means)

    torch.testing.assert_close(scores("kl_matching"), per_row(slow, ood().logits), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("values", [[1.0, 2.0, 3.0, 4.0], [5.0, 5.1, 5.2, 9.0, 5.3], [1e-3, 2e-3, 1e-2]])
def test_the_weibull_law_is_that_of_highest_likelihood(values: list[float]) -> None:
    shape, _, scale = stats.weibull_min.fit(values, floc=0)
    classifier = fit_weibull(torch.tensor(values))
    assert float(classifier[0]) == pytest.approx(shape, rel=1e-3)
    assert float(classifier[1]) == pytest.approx(scale, rel=1e-3)


def test_openmax_hands_evidence_of_the_best_classes_to_an_unknown_one() -> None:
    k, detector = fit_data(), fit_detector("openmax", fit_data(), tail=10, alpha=2)
    right = k.logits.argmax(1) == k.labels
    for c in range(3):
        rows = k.logits[right & (k.labels == c)].double()
        torch.testing.assert_close(detector.state["means"][c], rows.mean(0))
        far = sorted((row - rows.mean(0)).norm().item() for row in rows)[-10:]
        assert float(detector.state["shape"][c]) == pytest.approx(stats.weibull_min.fit(far, floc=0)[0], rel=1e-2)

    def slow(z: Tensor) -> float:
        new, unknown = z.clone(), 0.0
        for rank, c in enumerate(z.argsort(descending=True).tolist()[:2]):
            far = float((z - detector.state["means"][c]).norm())
            outside = 1 - math.exp(-((far / float(detector.state["scale"][c])) ** float(detector.state["shape"][c])))
            share = 1 - (2 - rank) / 2 * outside
            new[c], unknown = z[c] * share, unknown + float(z[c]) * (1 - share)
        return math.exp(unknown) / (math.exp(unknown) + sum(math.exp(v) for v in new.tolist()))

    torch.testing.assert_close(score(detector, ood()), per_row(slow, ood().logits), rtol=1e-4, atol=1e-7)


def test_gradnorm_is_the_norm_of_a_gradient() -> None:
    def slow(h: Tensor) -> float:
        layer = nn.Linear(*fit_data().head.weight.mT.shape, dtype=torch.float64)
        layer.load_state_dict({"weight": fit_data().head.weight.double(), "bias": fit_data().head.bias.double()})
        uniform = torch.full((3,), 1 / 3, dtype=torch.float64)
        F.kl_div(layer(h).log_softmax(0), uniform, reduction="sum").backward()
        assert layer.weight.grad is not None
        return -float(layer.weight.grad.abs().sum())

    torch.testing.assert_close(scores("gradnorm"), per_row(slow, ood().features), rtol=1e-4, atol=1e-6)


def test_the_percentile_is_an_order_statistic() -> None:
    values = torch.randn(7, 9, generator=torch.Generator().manual_seed(0))
    ordered = sorted(values.flatten().tolist())
    for percent in (0, 10, 33.3, 50, 90, 100):
        assert percentile(values, percent) == ordered[max(1, math.ceil(percent / 100 * 63)) - 1]


def test_react_bounds_features_and_dice_thins_the_head() -> None:
    head, h = fit_data().head, ood().features
    every = sorted(fit_data().features.flatten().tolist())
    bound = every[math.ceil(0.8 * len(every)) - 1]
    react = [energy_of(head(torch.tensor([[min(float(v), bound) for v in row]]))[0]) for row in h]
    torch.testing.assert_close(scores("react", percent=80), torch.tensor(react))
    assert float(h.max()) > bound

    mean = fit_data().features.mean(0)
    shares = sorted(float(head.weight[c, d] * mean[d]) for c in range(3) for d in range(len(mean)))
    least = shares[math.ceil(0.7 * len(shares)) - 1]
    thin = torch.tensor(
        [[float(w) if float(w * m) > least else 0.0 for w, m in zip(row, mean, strict=True)] for row in head.weight]
    )
    dice = [energy_of(row @ thin.mT + head.bias) for row in h]
    torch.testing.assert_close(scores("dice", percent=70), torch.tensor(dice), rtol=1e-4, atol=1e-5)
    assert 0 < int((thin == 0).sum()) < thin.numel()


def test_ash_and_scale_lengthen_features_by_the_share_of_the_largest() -> None:
    head = fit_data().head

    def slow(h: Tensor, prune: bool) -> float:
        largest = h.argsort(descending=True)[:3].tolist()  # 25 % of 12
        longer = math.exp(float(h.sum()) / float(h[largest].sum()))
        kept = [float(v) if i in largest or not prune else 0.0 for i, v in enumerate(h)]
        return energy_of(head(longer * torch.tensor([kept]))[0])

    for method, prune in (("ash", True), ("scale", False)):
        wanted = per_row(lambda h, prune=prune: slow(h, prune), ood().features)
        torch.testing.assert_close(scores(method, percent=75), wanted, rtol=1e-4, atol=1e-4)


def test_features_that_are_all_zero_get_a_finite_score() -> None:
    dead = Activations(None, torch.zeros(2, 12), fit_data().head.bias.expand(2, 3))
    for method in DETECTORS.keys() - {"odin", "gram"}:
        assert bool(score(fit_detector(method, fit_data()), dead).isfinite().all()), method


def test_mds_is_the_quadratic_form_of_the_nearest_class() -> None:
    k = fit_data()
    alive = k.features.std(0) > 0
    h, x = k.features[:, alive].double(), ood().features[:, alive]
    means = torch.stack([h[k.labels == c].mean(0) for c in range(3)])
    left = h - means[k.labels]
    inverse = torch.linalg.pinv(left.mT @ left / len(left), hermitian=True, rtol=1e-6)
    slow = per_row(lambda row: min(float((row - m) @ inverse @ (row - m)) for m in means), x)
    torch.testing.assert_close(scores("mds"), slow, rtol=1e-3, atol=1e-4)


def test_knn_is_a_full_search_among_rows_of_length_one() -> None:
    rows = [row / row.norm() for row in fit_data().features.double() if row.norm() > 0]
    rows += [row for row in fit_data().features.double() if row.norm() == 0]
    slow = per_row(lambda h: sorted(float((h / h.norm() - row).norm()) for row in rows)[4], ood().features)
    torch.testing.assert_close(scores("knn", k=5), slow, rtol=1e-4, atol=1e-5)


def test_vim_adds_the_norm_outside_the_principal_space_as_a_logit() -> None:
    k = fit_data()
    w, b = k.head.weight.double(), k.head.bias.double()
    origin = -torch.linalg.lstsq(w, b, driver="gelsd").solution
    _, _, directions = torch.linalg.svd(k.features.double() - origin, full_matrices=True)
    rest = directions[4:]

    def residual(h: Tensor) -> float:
        return math.sqrt(sum(float(d @ (h - origin)) ** 2 for d in rest))

    alpha = float(k.logits.double().amax(1).mean() / per_row(residual, k.features).double().mean())
    slow = per_row(lambda h, z: alpha * residual(h) + energy_of(z), ood().features, ood().logits)
    torch.testing.assert_close(scores("vim", dimensions=4), slow, rtol=1e-4, atol=1e-4)


def test_fdbd_averages_distances_to_decision_boundaries() -> None:
    w, mean = fit_data().head.weight.double(), fit_data().features.double().mean(0)

    def slow(h: Tensor, z: Tensor) -> float:
        best = int(z.argmax())
        apart = [float(z[best] - z[c]) / float((w[best] - w[c]).norm()) for c in range(3) if c != best]
        return -sum(apart) / 2 / float((h - mean).norm())

    torch.testing.assert_close(scores("fdbd"), per_row(slow, ood().features, ood().logits), rtol=1e-4, atol=1e-6)


def test_odin_moves_each_input_towards_confidence() -> None:
    model = trained_model()

    def slow(x: Tensor) -> float:
        x = x.float().requires_grad_(True)
        (model(x) / 50).log_softmax(0).max().backward()
        assert x.grad is not None
        moved = x.detach() + 0.02 * 2.0 * x.grad.sign()  # the training range is 2
        return 1 - float((model(moved).detach().double() / 50).softmax(0).max())

    torch.testing.assert_close(scores("odin", temperature=50, noise=0.02), per_row(slow, ood().inputs), rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_gram_sums_how_far_channels_correlate_outside_the_range_of_a_class() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 2), nn.Flatten(), nn.Linear(18, 2)).eval()
    x, other, new = torch.randn(3, 30, 1, 6, 6).unbind(0)
    classifier = find_features(model, x)
    batch = classifier.activations(x)
    k = FitData(
        classifier,
        batch.features,
        batch.logits,
        batch.logits.argmax(1),
        classifier.activations(other),
        torch.zeros(30).long(),
        lambda: x.split(8),
        RANGE,
    )
    detector = fit_detector("gram", k, powers=2)

    def statistics(row: Tensor) -> list[list[float]]:
        inputs = [model[:2](row[None])[0].flatten(1), model[:4](row[None])[0][:, None]]
        values = []
        for h in inputs:
            first = [sum(float(h[i] @ h[j]) for j in range(len(h))) for i in range(len(h))]
            second = [sum(float(h[i] ** 2 @ h[j] ** 2) for j in range(len(h))) ** 0.5 for i in range(len(h))]
            values.append(first + second)
        return values

    trained = {c: [statistics(row) for row in x[batch.logits.argmax(1) == c]] for c in (0, 1)}

    def deviations(row: Tensor) -> list[float]:
        same, total = trained[int(model(row[None]).argmax())], []
        for layer, values in enumerate(statistics(row)):
            total.append(0.0)
            for i, v in enumerate(values):
                low, high = min(s[layer][i] for s in same), max(s[layer][i] for s in same)
                total[-1] += max(0.0, low - v) / abs(low) + max(0.0, v - high) / abs(high)
        return total

    usual = torch.tensor([deviations(row) for row in other]).mean(0)
    slow = torch.stack([(torch.tensor(deviations(row)) / usual).sum() for row in new])
    torch.testing.assert_close(score(detector, classifier.activations(new)), slow, rtol=1e-3, atol=1e-3)


class SequenceClassifier(nn.Module):
    """A class of a sequence (B, T, 3) of any length: the mean of what each step gives."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.out = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.step(x * 2).relu().mean(1))


def test_gram_takes_sequences_of_any_length_and_layers_that_never_deviate() -> None:
    torch.manual_seed(0)
    model, x = SequenceClassifier(), torch.randn(40, 6, 3)
    with torch.no_grad():
        model.out.bias -= model(x).mean(0)  # both classes are predicted
    classifier = find_features(model, x)
    batch = classifier.activations(x)
    best = batch.logits.argmax(1)
    data = FitData(classifier, batch.features, batch.logits, best, batch, best, lambda: [x], RANGE)
    detector = fit_detector("gram", data)
    assert float(score(detector, batch).abs().max()) == 0  # validation data are the training data
    assert bool(detector.score(50 * torch.randn(4, 9, 3)).isfinite().all())


def test_powers_of_large_activations_do_not_overflow() -> None:
    assert bool(correlations(torch.full((1, 2, 4), 1e15), 5).isfinite().all())


def test_a_class_without_rows_is_named_by_those_that_need_it() -> None:
    k = fit_data()
    kept = (k.labels != 1) & (k.logits.argmax(1) != 1)
    x = classes(300)[0][kept]
    poor = FitData(
        k.classifier, k.features[kept], k.logits[kept], k.labels[kept], k.valid, k.valid_labels, lambda: x.split(64), RANGE
    )  # fmt: skip
    for method in ("mds", "kl_matching", "openmax", "gram"):
        with pytest.raises(DataError, match=r"of each of the 3 classes, but classes \[1\] have none.*such as 'energy' or 'knn'"):
            fit_detector(method, poor)
    for method in ("knn", "vim", "fdbd", "react", "temperature"):
        assert bool(score(fit_detector(method, poor), ood()).isfinite().all())


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("knn", {"k": 300}, "Expected `k` to be a whole number from 1 to 299, but got 300"),
        ("knn", {"k": 0}, "Expected `k` to be a whole number from 1 to 299"),
        ("react", {"percent": 101}, "Expected `percent` to be a number from 0 to 100, but got 101"),
        ("vim", {"dimensions": 12}, "Expected `dimensions` to be a whole number from 0 to 11, but got 12"),
        ("energy", {"temperature": 0}, "Expected `temperature` to be a number from 1e-06 to 1e.06, but got 0"),
        ("gen", {"top": 1.5}, "Expected `top` to be a whole number"),
        ("energy", {"k": 5}, r"Expected options of 'energy' to be one of \['temperature'\], but got 'k'"),
        ("enrgy", {}, "did you mean 'energy'.*but got 'enrgy'"),
    ],
)
def test_impossible_options_are_refused_in_words(method: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit_detector(method, fit_data(), **options)


def test_inputs_that_cannot_be_moved_are_refused_by_odin() -> None:
    detector = fit_detector("odin", fit_data())
    with pytest.raises(
        DataError, match=r"one tensor of floating-point numbers for 'odin', which moves them, but got torch.int64"
    ):
        score(detector, Activations(torch.zeros(2, 3).long(), torch.zeros(2, 12), torch.zeros(2, 3)))
