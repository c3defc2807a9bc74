"""The estimators: scikit-learn's own checks, and what they promise beyond them."""

from __future__ import annotations

import pickle
import sys

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.datasets import load_breast_cancer, load_digits, load_wine, make_moons
from sklearn.ensemble import RandomForestRegressor
from sklearn.exceptions import NotFittedError
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

import offmap
from offmap.errors import ConfigError, DataError
from offmap.integrations.nets import mlp
from offmap.integrations.sklearn import OffmapClassifier, OffmapDetector, OffmapRegressor, find_outliers
from offmap.scores.distance import compute_log_ratio

KINDS = [OffmapRegressor, OffmapClassifier, OffmapDetector]
SMALL = {"hidden": (16,), "steps": 60, "draws": 8}


def differ_by_chance(estimator) -> dict[str, str]:
    """As for scikit-learn's own that split rows at random: a repeated row may be in both parts, a heavy one is in one."""
    kinds = () if isinstance(estimator, OffmapDetector) else ("dense", "sparse")  # too few rows for the detector to flag any
    return {f"check_sample_weight_equivalence_on_{kind}_data": "rows are split and shuffled at random" for kind in kinds}


@parametrize_with_checks([kind(**SMALL) for kind in KINDS], expected_failed_checks=differ_by_chance)
def test_scikit_learn_accepts_the_estimators(estimator, check):
    check(estimator)


def wave(rows: int = 240, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two clusters of inputs far from 0, in large units; targets of another size altogether."""
    random = np.random.RandomState(seed)
    x = np.concatenate([random.randn(rows // 2) * 0.1 - 0.5, random.randn(rows - rows // 2) * 0.1 + 0.75])
    y = np.sin(6 * x) + 0.05 * random.randn(rows)
    return 1e4 + 1e3 * x[:, None], 5e7 + 1e6 * y


@pytest.fixture(scope="module")
def regressor() -> OffmapRegressor:
    return OffmapRegressor(random_state=0).fit(*wave())


@pytest.mark.parametrize("kind", KINDS)
def test_missing_values_are_taken_where_the_user_says_so(kind, tmp_path):
    random = np.random.RandomState(0)
    x = random.randn(400, 3)
    x[random.rand(400) < 0.2, 1] = np.nan
    y = (x[:, 0] > 0).astype(int) if kind is OffmapClassifier else x[:, 0]
    with pytest.raises(ValueError, match="Input X contains NaN"):
        kind(**SMALL).fit(x, y)
    estimator = kind(**SMALL, allow_nan=True, random_state=0).fit(x[:300], y[:300])
    assert [made.__sklearn_tags__().input_tags.allow_nan for made in (estimator, kind())] == [True, False]
    never = x[300:].copy()
    never[:, 2] = np.nan  # which no training row lacks
    usual = estimator.score_samples(x[300:])
    gaps = np.isnan(x[300:, 1])
    assert estimator.off_map(x[300:])[gaps].mean() < 0.3
    assert np.isfinite(usual).all()
    assert estimator.off_map(never).all()
    with pytest.raises(ValueError, match="Input X contains infinity"):
        estimator.predict(np.where(np.isnan(x), np.inf, x))
    estimator.guard_.export(tmp_path / "guard.onnx", torch.from_numpy(x[300:]))
    if kind is OffmapDetector:
        x[:10] *= 30
        assert (kind(**SMALL, allow_nan=True, random_state=0).fit_predict(x)[:10] == -1).all()


def test_a_regressor_predicts_in_the_units_of_the_targets_and_is_unsure_between_the_data(regressor):
    x, y = wave(seed=1)
    mean, std = regressor.predict(x, return_std=True)
    assert regressor.score(x, y) > 0.95
    inside = np.abs(y - mean) < 2 * std
    assert 0.85 < inside.mean() <= 1
    ood = 1e4 + 1e3 * np.array([[0.1], [2.5], [-2.5]])
    assert regressor.predict(ood, return_std=True)[1][1] > 2 * np.median(std)
    assert regressor.off_map(ood).tolist() == [True, True, True]
    assert regressor.off_map(x).mean() < 0.2
    interval = regressor.guard_.interval(torch.tensor(x))
    assert float(((interval.lower.numpy() <= y) & (y <= interval.upper.numpy())).mean()) > 0.85


def test_units_change_nothing_but_units(regressor):
    """Powers of two, so that rounding is the same: training would make much of little."""
    x, y = wave()
    other = OffmapRegressor(random_state=0).fit(x / 1024, y / 4096)
    seen = np.concatenate([x[:20], x[:3] + 5e3])
    mean, std = regressor.predict(seen, return_std=True)
    scaled = other.predict(seen / 1024, return_std=True)
    np.testing.assert_allclose(scaled[0] * 4096, mean, rtol=1e-12)
    np.testing.assert_allclose(scaled[1] * 4096, std, rtol=1e-9)
    np.testing.assert_allclose(other.score_samples(seen / 1024), regressor.score_samples(seen), rtol=0, atol=1e-6)


def test_several_targets_have_a_column_each():
    x, y = wave()
    both = OffmapRegressor(**SMALL, random_state=0).fit(x, np.stack([y, -y / 1e6], 1))
    mean, std = both.predict(x, return_std=True)
    assert mean.shape == std.shape == (240, 2)
    assert both.score(x, np.stack([y, -y / 1e6], 1)) > 0.5


def test_a_pipeline_a_grid_and_a_pickle_keep_the_guard():
    x, labels = make_moons(200, noise=0.1, random_state=0)
    y = np.array(["left", "right"])[labels]
    search = GridSearchCV(
        make_pipeline(StandardScaler(), OffmapClassifier(**SMALL, random_state=0)),
        {"offmapclassifier__hidden": [(2,), (32,)], "offmapclassifier__lr": [0.03]},
        cv=2, error_score="raise",
    ).fit(x, y)  # fmt: skip
    assert search.best_params_["offmapclassifier__hidden"] == (32,)
    assert search.score(x, y) > 0.85
    content = pickle.dumps(search)
    again = pickle.loads(content)
    np.testing.assert_array_equal(again.predict_proba(x), search.predict_proba(x))
    last, copied = (s.best_estimator_[-1] for s in (search, again))
    np.testing.assert_array_equal(copied.score_samples(x), last.score_samples(x))
    assert copied.classes_.tolist() == ["left", "right"]
    assert len(content) < 400_000  # the guard caches draws of several megabytes


def test_the_detector_has_the_sign_of_scikit_learn_and_beats_chance_by_far():
    x, _ = make_moons(400, noise=0.05, random_state=0)
    ood = np.random.RandomState(0).uniform(-3, 3, (300, 2))
    ood = ood[np.linalg.norm(ood[:, None] - x, axis=2).min(1) > 0.5]
    inside, _ = make_moons(300, noise=0.05, random_state=1)
    detector = OffmapDetector(random_state=0).fit(x)
    scores = detector.score_samples(np.concatenate([inside, ood]))
    assert roc_auc_score([1] * len(inside) + [0] * len(ood), scores) > 0.97
    np.testing.assert_allclose(scores[: len(inside)], -detector.guard_.score(torch.tensor(inside)).numpy())
    assert (detector.predict(inside) == 1).mean() > 0.85
    assert (detector.predict(ood) == -1).mean() > 0.9
    np.testing.assert_array_equal(detector.off_map(ood), detector.predict(ood) == -1)


def test_false_alarms_move_the_threshold():
    x, _ = make_moons(400, noise=0.1, random_state=0)
    strict = OffmapDetector(**SMALL, random_state=0).fit(x)
    loose = clone(strict).set_params(false_alarms=0.3).fit(x)
    np.testing.assert_array_equal(strict.score_samples(x), loose.score_samples(x))
    assert loose.offset_ > strict.offset_
    assert 0.05 < (loose.predict(make_moons(400, noise=0.1, random_state=1)[0]) == -1).mean() < 0.6


def test_few_rows_flag_nothing():
    x = np.random.RandomState(0).randn(30, 2)
    detector = OffmapDetector(**SMALL, random_state=0).fit(x)
    assert detector.offset_ == -np.inf
    assert (detector.predict(x + 100) == 1).all()
    assert (detector.score_samples(x + 100) < detector.score_samples(x).min()).all()


def test_random_state_alone_decides():
    x, y = make_moons(100, noise=0.1, random_state=0)
    first, same, other = (OffmapClassifier(**SMALL, random_state=seed).fit(x, y).predict_proba(x) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, same)
    assert np.abs(first - other).max() > 1e-3
    torch.manual_seed(5)
    np.testing.assert_array_equal(OffmapClassifier(**SMALL, random_state=0).fit(x, y).predict_proba(x), first)


def test_a_ready_net_is_guarded_and_left_as_it_is():
    x, y = make_moons(200, noise=0.1, random_state=0)
    net = mlp(2, 2, hidden=[16], seed=0)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.03)
    for _ in range(150):
        loss = nn.functional.cross_entropy(net(torch.tensor(x, dtype=torch.float32)), torch.tensor(y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    classifier = clone(OffmapClassifier(model=net, draws=8, random_state=0)).fit(x, y)
    plain = net(torch.tensor(x, dtype=torch.float32)).argmax(1).numpy()
    assert (classifier.predict(x) == plain).mean() > 0.95
    assert classifier.guard_.predictive.members == 1
    with pytest.raises(ConfigError, match="a `model` with logits of the 2 classes in `y`, but it has 5"):
        OffmapClassifier(model=mlp(2, 5, hidden=[16], seed=0), draws=8).fit(x, y)
    detector = OffmapDetector(model=net, draws=8, random_state=0)
    with pytest.raises(ConfigError, match="Expected `y` beside a ready `model`: the targets that it was trained on."):
        detector.fit(x)
    assert (detector.fit(x, y).predict(x + 10) == -1).all()
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation": 1.5}, "Expected `validation` strictly between 0 and 1, such as 0.2, but got 1.5."),
        ({"false_alarms": 0}, "Expected `false_alarms` strictly between 0 and 1, such as 0.05, but got 0."),
        ({"members": 0}, "Expected `members` to be a whole number above 0, but got 0."),
        ({"steps": 2.5}, "Expected `steps` to be a whole number above 0 or None, but got 2.5."),
        ({"solver": "magic"}, "Expected `solver` to be one of"),
        ({"score_with": "magic"}, "Expected `score` to be one of"),
    ],
)
def test_impossible_parameters_are_named_at_fit_time(options, message):
    with pytest.raises(offmap.OffmapError, match=message):
        OffmapDetector(**SMALL | options).fit(np.random.RandomState(0).randn(50, 2))


def test_before_the_fit_and_with_one_class_the_messages_are_scikit_learns():
    with pytest.raises(NotFittedError, match="This OffmapRegressor instance is not fitted yet"):
        OffmapRegressor().predict([[1.0]])
    with pytest.raises(ValueError, match="Expected at least two classes, but `y` holds one class only, a."):
        OffmapClassifier().fit(np.zeros((9, 2)), ["a"] * 9)


def test_without_scikit_learn_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.delitem(sys.modules, "offmap.integrations.sklearn")
    with pytest.raises(ConfigError) as error:
        __import__("offmap.integrations.sklearn")
    assert str(error.value) == "scikit-learn is needed here and is not installed: pip install 'offmap[sklearn]'"


def contaminate(x: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Multiply 5 % of the rows by six; which ones, (n,) bool."""
    gross = np.random.RandomState(seed).permutation(len(x)) < 0.05 * len(x)
    return np.where(gross[:, None], 6 * x, x), gross


@pytest.mark.parametrize("data", [load_breast_cancer, load_wine])
def test_gross_outliers_among_the_training_rows_are_found(data):
    x, gross = contaminate(data().data, seed=0)
    detector = OffmapDetector(random_state=0)
    flagged = detector.fit_predict(x) == -1
    assert flagged[gross].all()
    assert flagged[~gross].mean() < 0.1
    np.testing.assert_array_equal(flagged, detector.decision_function(x) < 0)
    np.testing.assert_array_equal(flagged, detector.score_samples(x) < detector.offset_)
    assert roc_auc_score(~gross, detector.score_samples(x)) == 1


@pytest.mark.parametrize("data", [load_breast_cancer, load_wine, load_digits])
def test_no_outliers_are_seen_in_clean_tables(data):
    assert not find_outliers(torch.tensor(data().data), None).any()
    assert not find_outliers(torch.zeros(30, 3, dtype=torch.float64), None).any()


def test_contamination_says_how_many_training_rows_are_outliers():
    x, gross = contaminate(load_wine().data, seed=1)
    detector = OffmapDetector(**SMALL, contamination=0.2, random_state=0)
    flagged = detector.fit_predict(x) == -1
    assert flagged.sum() == np.ceil(0.2 * (len(x) - 1))  # as IsolationForest does
    assert flagged[gross].all()
    assert detector.guard_.calibration.seen
    for share in (0, 0.6, True, "some", None):
        with pytest.raises(ConfigError, match="Expected `contamination` to be 'auto' or a share above 0 and at most 0.5, but"):
            detector.set_params(contamination=share).fit(x)


def test_a_training_row_is_not_compared_with_itself():
    x = np.random.RandomState(0).randn(80, 3)
    detector = OffmapDetector(**SMALL, score_with="inputs", random_state=0).fit(x)
    space = detector.guard_.score_module.space
    distances = np.linalg.norm(space.rows[:, None] - space.rows, axis=2) + np.diag(np.full(len(space.rows), np.inf))
    parts = [np.arange(part, len(space.rows), space.parts) for part in range(space.parts)]  # the nearest row of each counts
    nearest = np.stack([part[distances[:, part].argmin(1)] for part in parts], 1)
    alone = compute_log_ratio(torch.tensor(np.take_along_axis(distances, nearest, 1)), torch.tensor(nearest), space.spacings)
    held = (space.rows * space.unit + space.centre).numpy()
    rows = np.linalg.norm(x[:, None] - held, axis=2).argmin(0)  # the same numbers, to the bit
    np.testing.assert_allclose(-detector.score_samples(x[rows]), space.zscore(alone), atol=1e-9)
    assert (-detector.score_samples(x[rows]) >= detector.guard_.score(x[rows]).numpy()).all()
    assert (-detector.score_samples(x[rows])).mean() > detector.guard_.score(x[rows]).numpy().mean() + 0.3
    np.testing.assert_allclose(-detector.score_samples(x + 0.1), detector.guard_.score(x + 0.1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipeline_gives_the_verdict(kind):
    words = np.array(["red", "green", "blue"], dtype=object)[np.arange(90) % 3]
    x = np.column_stack([np.random.RandomState(0).randn(90, 2).astype(object), words])
    encode = make_column_transformer((OneHotEncoder(), [2]), remainder=StandardScaler(), sparse_threshold=1.0)
    pipe = make_pipeline(encode, kind(**SMALL, random_state=0)).fit(x, np.arange(90) % 2)
    far = np.array([[50.0, -50.0, "red"]], dtype=object)
    rows = pipe[:-1].transform(np.concatenate([x[:5], far]))
    assert sparse.issparse(rows)
    prediction, ood = pipe.predict(np.concatenate([x[:5], far]), return_ood=True)
    assert ood[-1]
    assert not ood[:-1].any()
    np.testing.assert_array_equal(prediction, pipe[-1].predict(rows))
    np.testing.assert_array_equal(ood, pipe[-1].off_map(rows.toarray()))
    np.testing.assert_array_equal(ood, pipe.score_samples(np.concatenate([x[:5], far])) < pipe[-1].offset_)
    if kind is OffmapDetector:  # others must not have it, or mean classes by it
        np.testing.assert_array_equal(ood, pipe.decision_function(np.concatenate([x[:5], far])) < 0)


def test_sparse_rows_that_fill_no_memory_are_refused():
    with pytest.raises(
        offmap.OffmapError, match="at most 50,000,000 numbers in a sparse matrix, but got 60,000 rows of 1,000. Pass fewer"
    ):
        OffmapDetector().fit(sparse.csr_matrix((60_000, 1_000)))


def test_masked_values_and_numbers_whose_squares_overflow_are_refused_at_fit_time():
    x = np.random.RandomState(0).randn(60, 2)
    marked = np.r_[x, [[np.finfo(float).max, 0]]]
    with pytest.raises(DataError, match="numbers up to 1e[+]150 in `X`, but row 60 has a larger one. Does it mark a missing"):
        OffmapDetector().fit(marked)
    with pytest.raises(DataError, match="numbers up to 1e[+]150 in `y`, but row 0"):
        OffmapRegressor().fit(x, 1e200 * x[:, 0])
    with pytest.raises(DataError, match="arrays without masked values, but got 60 of them. Fill them"):
        OffmapDetector().fit(np.ma.masked_array(x, np.arange(120).reshape(60, 2) % 2))
    detector = OffmapDetector(draws=5, random_state=0).fit(x)
    assert detector.predict(marked)[-1] == -1


def test_weights_count_rows_and_a_weight_of_0_leaves_one_out():
    x = np.random.RandomState(0).rand(400, 1)
    y, weight = np.arange(400) % 4 * 1.0, np.array([9.0, 1.0, 0.0, 0.0])[np.arange(400) % 4]
    mean = OffmapRegressor(**SMALL, random_state=0).fit(x, y, sample_weight=weight).predict(x)
    assert abs(mean.mean() - 0.1) < 0.1  # of rows that count the same 0.5, or 1.5 with those of weight 0
    probs = OffmapClassifier(**SMALL, random_state=0).fit(x, y, sample_weight=weight + 0.01).predict_proba(x)
    assert probs[:, 0].mean() > 0.8
    far = np.concatenate([x, x[:20] + 100])
    detector = OffmapDetector(**SMALL, random_state=0).fit(far, sample_weight=np.arange(420) < 400)
    assert (detector.predict(far[400:]) == -1).all()


def test_one_width_is_one_layer_and_unknown_arguments_name_the_class():
    x = np.random.RandomState(0).randn(60, 2)
    one, same = (OffmapDetector(**SMALL | {"hidden": hidden}, random_state=0).fit(x) for hidden in (16, (16,)))
    np.testing.assert_array_equal(one.score_samples(x), same.score_samples(x))
    for kind in KINDS:
        with pytest.raises(TypeError, match=rf"{kind.__name__}.__init__\(\) got an unexpected keyword argument 'layers'"):
            kind(layers=3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_guard_of_an_estimator_can_be_saved(kind, tmp_path):
    x, y = wave()
    estimator = kind(**SMALL, random_state=0).fit(x, y > 5e7 if kind is OffmapClassifier else y)
    estimator.guard_.save(tmp_path / "guard")
    again = offmap.load(tmp_path / "guard", estimator.nets_)
    for name, value in vars(again(x[:9])).items():
        assert value is None or torch.equal(value, getattr(estimator.guard_(x[:9]), name)), name


def test_data_frames_keep_their_names_and_may_have_any_type_of_number():
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    x, y = wave(60)
    plain = pandas.DataFrame({"far": x[:, 0], "count": np.arange(60) % 5, "wet": np.arange(60) % 2 == 0})
    expected = OffmapRegressor(**SMALL, random_state=0).fit(plain, y)
    assert expected.guard_.about == {"inputs": ["far", "count", "wet"]}
    nullable, arrow = plain.convert_dtypes(), plain.convert_dtypes(dtype_backend="pyarrow")
    assert [str(kind) for kind in (nullable.dtypes["count"], arrow.dtypes["wet"])] == ["Int64", "bool[pyarrow]"]
    for frame in (nullable, arrow, polars.DataFrame(plain.to_dict("list"))):
        estimator = OffmapRegressor(**SMALL, random_state=0).fit(frame, y)
        assert estimator.feature_names_in_.tolist() == ["far", "count", "wet"]
        np.testing.assert_array_equal(estimator.predict(frame), expected.predict(plain))
    with pytest.raises(ValueError, match="The feature names should match those that were passed during fit."):
        expected.predict(plain[["count", "far", "wet"]])


def test_long_fits_tell_how_far_they_are(monkeypatch, capsys):
    x = np.random.RandomState(0).randn(60, 2)
    monkeypatch.setattr("offmap.progress.SECONDS", 0.01)
    OffmapDetector(**SMALL, random_state=0).fit(x)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("offmap.integrations.nets.QUIET_SECONDS", -1.0)
    OffmapDetector(**SMALL | {"steps": 200}, random_state=0).fit(x)
    assert "offmap: Training nets " in capsys.readouterr().err


def test_a_model_that_is_no_net_is_told_the_roads_that_work():
    forest = RandomForestRegressor(n_estimators=2).fit([[0.0], [1.0]], [0.0, 1.0])
    with pytest.raises(offmap.OffmapError, match=r"got RandomForestRegressor\. Put .*OffmapDetector.* guard trees as draws"):
        offmap.fit(forest, (torch.zeros(4, 1), torch.zeros(4)))
    with pytest.raises(offmap.OffmapError, match=r"Expected a torch.nn.Module or a list of them, but got int\.$"):
        offmap.fit(3, (torch.zeros(4, 1), torch.zeros(4)))  # type: ignore[arg-type]
