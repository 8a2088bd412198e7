"""Fitting on small synthetic files: repeatable, better than the bound alone; validation counts what it leaves out."""

import json

import numpy as np
import pytest

from mixfleet.calibrate import fit, validate
from mixfleet.calibrate.tables import read
from mixfleet.cluster import device_named
from mixfleet.cost import learned, query
from mixfleet.cost.learned import Layer
from mixfleet.errors import InputError

pandas = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")
DEVICES = ("A100-SXM4-80GB", "H100-SXM", "L4")


def frame(rows=1500, seed=3, gpus=DEVICES):
    """Times of a made-up library: 70 % of the tensor peak, 80 % of the bandwidth, 5 us of floor."""
    rng = np.random.default_rng(seed)
    m, n, k = (2 ** rng.integers(5, 15, rows) for _ in range(3))
    gpu = rng.choice(gpus, rows)
    flops = np.array([device_named(g).flops["bf16"] for g in gpu])
    memory = np.array([device_named(g).memory_Bps for g in gpu])
    time = 5e-6 + np.maximum(2.0 * m * n * k / flops / 0.7, 2.0 * (m * k + n * k + m * n) / memory / 0.8)
    return pandas.DataFrame({"source": "made", "gpu": gpu, "op": "gemm", "dtype": "bf16", "trans": "", "m": m,
                             "n": n, "k": k, "batch": 1, "backend": "torch", "suspect": False, "time_us": time * 1e6})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    frame().to_parquet(path / "gemm.parquet")
    return path


def test_the_same_data_give_the_same_bytes(folder, tmp_path):
    pytest.importorskip("catboost")
    for name in ("a.npz", "b.npz"):
        learned.save(fit.fit(folder, trees=12, depth=4, folds=1), tmp_path / name)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_groups_fitted_one_by_one_make_the_file_of_all_at_once(tmp_path, capsys, monkeypatch):
    pytest.importorskip("catboost")
    from mixfleet.cli import main

    for name, value in (("TREES", 5), ("MORE_TREES", {}), ("FOLDS", 1), ("SPREAD_TREES", 3)):
        monkeypatch.setattr(fit, name, value)

    narrow = frame(300, seed=8).assign(dtype="fp32")
    pandas.concat([frame(300), narrow]).to_parquet(tmp_path / "gemm.parquet")
    fit_to = ["calibrate", "fit", "--data", str(tmp_path), "-o"]
    assert main([*fit_to, str(tmp_path / "all.npz")]) == 0
    for group in ("gemm.fp32", "gemm.16bit"):
        assert main([*fit_to, str(tmp_path / "each.npz"), "--group", group]) == 0
    assert (tmp_path / "each.npz").read_bytes() == (tmp_path / "all.npz").read_bytes()
    assert set(learned.load(tmp_path / "each.npz").groups) == {"gemm.fp32", "gemm.16bit"}
    assert main([*fit_to, str(tmp_path / "each.npz"), "--group", "gemm.f32"]) == 2
    assert "unknown group of kernels 'gemm.f32'; did you mean" in capsys.readouterr().err
    assert (tmp_path / "each.npz").read_bytes() == (tmp_path / "all.npz").read_bytes()


def test_a_fit_learns_the_efficiencies_of_the_data(folder):
    pytest.importorskip("catboost")
    (name, sample), = fit.samples(folder).items()
    test = fit.held_out(sample)
    fitted = fit.fit_group(sample.take(~test), trees=60, depth=5)
    score = fit.score("rows", sample.take(test), name, *fitted)
    assert name == "gemm.16bit"
    assert 0 < test.sum() < sample.rows / 5
    assert score.mean < 0.08
    assert set(fitted[0].factors) == set(DEVICES)
    for factors in fitted[0].factors.values():
        assert factors.floor_s["made"] == pytest.approx(5e-6, rel=0.1)
        assert factors.chip["bf16"] == pytest.approx(0.7, rel=0.05)


def test_leaving_a_device_out_hides_it(folder):
    pytest.importorskip("catboost")
    (name, sample), = fit.samples(folder).items()
    found = list(fit.left_out("gpu", name, sample, folds=2, trees=30, depth=4))
    assert [scored.left_out for scored, _, _ in found] == ["L4", "H100-SXM", "A100-SXM4-80GB"]
    for scored, rest, (group, _, _) in found:
        assert scored.rows == rest.rows == (sample.columns["gpu"] == scored.left_out).sum()
        assert scored.left_out not in group.factors
    # two folds: the first and third device by architecture were left out together
    assert set(found[0][2][0].factors) == set(found[1][2][0].factors) == {"A100-SXM4-80GB"}


def test_a_few_measurements_find_a_slow_device():
    device = device_named("H100-SXM").replace(name="throttled")
    rng = np.random.default_rng(0)
    sizes = {c: 2 ** rng.integers(7, 13, 60) for c in "mnk"}
    truth = query.predict("gemm", sizes, device).time_s * 1.4
    some = {c: v[:20] for c, v in sizes.items()}
    factors = query.adapt(device, "gemm", some, truth[:20])
    rest = {c: v[20:] for c, v in sizes.items()}

    def error(**options):
        return np.median(np.abs(query.predict("gemm", rest, device, **options).time_s / truth[20:] - 1))

    assert error() == pytest.approx(0.4 / 1.4, rel=1e-6)
    assert error(factors=factors) < 0.06


def test_floors_come_from_short_kernels_only():
    """Large kernels hide the floor: a device timed on them alone has the floor that the library has on others."""
    data = frame(2000)
    large = 2.0 * data.m * data.n * data.k > 1e11
    data = data[(data.gpu != "L4") | large]
    sample = fit.Sample("gemm", {c: data[c].to_numpy() for c in data.columns if c not in ("suspect", "time_us")},
                        {g: device_named(g) for g in DEVICES}, data.time_us.to_numpy() * 1e-6)
    assert sample.time_s[sample.columns["gpu"] == "L4"].min() > 2e-4
    assert fit.factors(sample)["L4"].floor_s["made"] == pytest.approx(5e-6, rel=0.1)


def test_intervals_hold_four_fifths_of_rows_they_never_saw(tmp_path):
    pytest.importorskip("catboost")
    rng = np.random.default_rng(4)
    data = frame(6000)
    # one device is measured with four times the noise of the others
    data["time_us"] *= np.exp(rng.normal(0, np.where(data.gpu == "L4", 0.2, 0.05)))
    data[:4500].to_parquet(tmp_path / "gemm.parquet")
    layer = fit.fit(tmp_path, trees=60, depth=5)
    new = data[4500:]
    found = query.predict("gemm", {c: new[c].to_numpy() for c in ("m", "n", "k", "gpu", "source", "backend", "dtype")},
                          {g: device_named(g) for g in DEVICES}, layer=layer)
    time = new.time_us.to_numpy() * 1e-6
    inside = (found.low_s <= time) & (time <= found.high_s)
    assert inside.mean() == pytest.approx(0.8, abs=0.05)
    width = np.log(found.high_s / found.low_s)
    assert width[new.gpu == "L4"].mean() > 2 * width[new.gpu == "H100-SXM"].mean()
    assert inside[new.gpu == "L4"].mean() > 0.65


def test_measurements_that_agree_change_nothing_and_outliers_little():
    device = device_named("H100-SXM")
    sizes = {c: 2 ** np.random.default_rng(1).integers(7, 13, 12) for c in "mnk"}
    times = query.predict("gemm", sizes, device).time_s
    same = query.predict("gemm", sizes, device, factors=query.adapt(device, "gemm", sizes, times, known=True)).time_s
    assert same == pytest.approx(times, rel=1e-6)
    wrong = times.copy()
    wrong[3] *= 20
    found = query.predict("gemm", sizes, device, factors=query.adapt(device, "gemm", sizes, wrong, known=True)).time_s
    others = np.arange(12) != 3
    assert np.abs(np.log(found / times))[others].max() < 0.2


def test_deviations_by_hand():
    """One measurement of itself: weight residual / (k + noise), and a prediction of k times that at the same point."""
    device = device_named("H100-SXM")
    one = {"m": 512, "n": 1024, "k": 768}
    start = query.predict("gemm", one, device).time_s[0]
    factors = query.adapt(device, "gemm", one, start * 1.05, known=True)
    deviations = factors[device.name].deviations
    parts = sum(share**2 for share in deviations.shares[0])
    assert deviations.shares[0][0] + deviations.shares[0][3] == pytest.approx(1)  # floor, and all above it
    # of the device, a source, a backend, alike kernels, a kind of demand, a shape; and of the pipelines
    prior = deviations.scale**2 * (0.2**2 + 0.1**2 + 0.1**2 + 0.2**2 + 0.1**2 + 0.1**2 + 0.2**2 * parts)
    (weight,) = deviations.weights
    gain = [prior / (prior + noise**2) for noise in (0.05, 0.1)]
    assert any(prior * weight == pytest.approx(np.log(1.05) * g, rel=0.05) for g in gain)
    after = query.predict("gemm", one, device, factors=factors).time_s[0]
    assert np.log(after / start) == pytest.approx(prior * weight)


def test_adapt_wants_positive_times_of_one_group():
    device = device_named("L4")
    for times in ([], [0.0], [-1e-6], [np.nan], [np.inf]):
        with pytest.raises(InputError, match="at least one measurement"):
            query.adapt(device, "gemm", {"m": 1, "n": 2, "k": 3}, times)
    with pytest.raises(InputError, match=r"gemm\.16bit, gemm\.fp32"):
        query.adapt(device, "gemm", {"m": [8, 8], "n": 8, "k": 8, "dtype": ["bf16", "fp32"]}, [1e-6, 2e-6])


def test_validation_counts_rows_and_reasons(tmp_path):
    data = frame(40)
    data.loc[0, "time_us"] = np.nan
    data.loc[1, "suspect"] = True
    data.loc[2, "m"] = 0
    data.loc[3, "gpu"] = "Q9000"
    data.loc[4, "dtype"] = "fp7"
    path = tmp_path / "gemm.parquet"
    data.to_parquet(path)
    found = validate.validate(path)
    assert sum(found.not_expressible.values()) == 5
    assert found.not_expressible["marked suspect"] == 1
    assert found.not_expressible["time is not a positive number"] == 1
    assert len(found.rows) == found.total.rows == sum(s.rows for s in found.summaries) == 35
    row = found.rows[0]
    assert row.where == 5
    assert row.measured_s == pytest.approx(data.time_us[5] * 1e-6)
    errors = np.array([r.predicted_s / r.measured_s - 1 for r in found.rows])
    assert found.total.bias == pytest.approx(errors.mean())
    assert found.total.median_ape == pytest.approx(np.median(np.abs(errors)))
    assert found.total.p90_ape == pytest.approx(np.quantile(np.abs(errors), 0.9))


def test_csv_files_give_the_same_answer(tmp_path):
    frame(30).to_parquet(tmp_path / "gemm.parquet")
    frame(30).to_csv(tmp_path / "gemm.csv", index=False)
    a, b = (validate.validate(tmp_path / f"gemm.{kind}").total for kind in ("parquet", "csv"))
    assert a == pytest.approx(b, nan_ok=False) if not isinstance(a, tuple) else a[2:] == pytest.approx(b[2:])


def test_missing_columns_are_named_with_the_file(tmp_path):
    path = tmp_path / "gemm.parquet"
    frame(5).drop(columns=["time_us", "k"]).to_parquet(path)
    with pytest.raises(InputError, match=r"gemm\.parquet: columns? .*time_us"):
        read(path)
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match=r"other\.csv: columns .* missing"):
        validate.validate(other)


def test_broken_files_are_named(tmp_path, capsys):
    from mixfleet.cli import main

    (tmp_path / "gemm.parquet").write_bytes(b"no parquet")
    assert main(["validate", str(tmp_path / "gemm.parquet")]) == 2
    assert "gemm.parquet" in capsys.readouterr().err
    assert main(["calibrate", "fit", "--data", str(tmp_path), "-o", str(tmp_path / "k.npz")]) == 2
    assert "gemm.parquet: not a table" in capsys.readouterr().err
    frame(20).drop(columns=["k"]).to_parquet(tmp_path / "gemm.parquet")
    assert main(["calibrate", "fit", "--data", str(tmp_path), "-o", str(tmp_path / "k.npz")]) == 2
    assert "gemm.parquet: column k missing" in capsys.readouterr().err


def test_the_command_line(tmp_path, capsys):
    from mixfleet.cli import main

    path, rows, svg = (tmp_path / n for n in ("gemm.parquet", "rows.csv", "plot.svg"))
    frame(20).to_parquet(path)
    assert main(["validate", str(path), "--json", "--rows", str(rows), "--plot", str(svg)]) == 0
    assert json.loads(capsys.readouterr().out)["total"]["rows"] == 20
    assert len(rows.read_text().splitlines()) == 21
    assert svg.read_text().count("<circle") == 20
    assert main(["validate", str(path)]) == 0
    assert "L4" in capsys.readouterr().out
    assert main(["calibrate", "fit", "--data", str(tmp_path / "nowhere")]) == 2
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["calibrate", "fit", "--data", str(empty)]) == 2
    assert "no kernel files" in capsys.readouterr().err


def test_layers_can_be_passed_by_hand():
    layer = learned.load()
    one = Layer({"gemm.fp32": layer.groups["gemm.fp32"]}, {"gemm.fp32": layer.forests["gemm.fp32"]}, layer.relatives)
    with pytest.raises(InputError, match=r"no coefficients for gemm\.16bit"):
        query.gemm(8, 8, 8, device_named("L4"), layer=one)
