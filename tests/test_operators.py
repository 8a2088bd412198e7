"""Measured operators of whole models: which kernels they are, by hand, and what is left out and why."""

import pytest

from mixfleet.calibrate import validate
from mixfleet.calibrate.operators import OPERATORS
from mixfleet.cluster import device_named
from mixfleet.cost import query
from mixfleet.errors import InputError

pandas = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

COMMON = {"source": "neusight-label", "gpu": "A100-PCIe-40GB", "dtype": "fp32", "model": "m", "mode": "train",
          "module": "x"}


def row(op, inputs, out, fw, bw=0.0, **other):
    return {**COMMON, "op": op, "in_shapes": str(inputs), "out_shape": str(out), "fw_us": fw, "bw_us": bw,
            "time_us": fw + bw, **other}


def kernels(op, inputs, out):
    return [[(k.kind, k.sizes) for k in each] for each in OPERATORS[op](inputs, out)]


def test_a_product_and_its_two_gradients():
    forward, backward = kernels("linear", [(3, 5, 7)], (3, 5, 11))
    assert forward == [("gemm", {"batch": 1, "m": 15, "n": 11, "k": 7, "op": "gemm"})]
    assert [(k["m"], k["n"], k["k"]) for _, k in backward] == [(15, 7, 11), (7, 11, 15)]
    assert kernels("addmm", [(11,), (15, 7), (7, 11)], (15, 11))[0] == forward
    batched = kernels("matmul", [(2, 3, 5, 7), (2, 3, 7, 13)], (2, 3, 5, 13))
    assert batched[0] == [("gemm", {"batch": 6, "m": 5, "n": 13, "k": 7, "op": "bmm"})]
    assert kernels("matmul", [(2, 5, 7), (7, 13)], (2, 5, 13))[0][0][1]["m"] == 10


def test_elementwise_operators_move_their_inputs_as_large_as_the_result():
    both, one = ([(2, 3, 5), (2, 3, 5)], (2, 3, 5)), ([(2, 3, 5), (5,)], (2, 3, 5))
    assert kernels("mul", *both)[0] == [("stream", {"rows": 6, "cols": 5, "op": "mul", "n_in": 2, "n_out": 1})]
    assert kernels("mul", *one)[0] == [("stream", {"rows": 6, "cols": 5, "op": "mulu", "n_in": 1, "n_out": 1})]
    assert len(kernels("mul", *both)[1]) == 2
    assert kernels("add", *both)[1] == []
    assert [k["op"] for _, k in kernels("layernorm", [(2, 3, 5)], (2, 3, 5))[1]] == ["mul", "mul"]


def test_each_pass_is_a_prediction_and_the_rest_has_a_reason(tmp_path):
    path = tmp_path / "train_ops.parquet"
    pandas.DataFrame([
        row("linear", [[512, 1024]], (512, 4096), 300.0, 610.0),
        row("linear", [[512, 1024]], (512, 1024), 20.0, module="layers.0.activation_fn"),
        row("dropout", [[8, 64]], (8, 64), 10.0, mode="inf"), row("where", [[8, 64]], (8, 64), 10.0),
        row("add", [[8, 64]], (8, 64), 10.0, dtype="int64"), row("add", [[8, 64]], (8, 64), 10.0, gpu="A1000"),
        row("add", "?", (8, 64), 10.0), row("add", [[1]], (1,), 5.0), row("tanh", [[8, 64]], (8, 64), 0.0),
    ]).to_parquet(path)
    found = validate.validate(path)
    assert [(r.where, r.what) for r in found.rows] == [(0, "linear forward fp32"), (0, "linear backward fp32"),
                                                       (1, "relu forward fp32")]
    device = device_named("A100-PCIe-40GB")
    like = {"dtype": "fp32", "source": "neusight", "backend": "torch/cublas"}
    times = query.predict("gemm", {"m": [512, 512, 1024], "n": [4096, 1024, 4096], "k": [1024, 4096, 512], **like},
                          device)
    assert found.rows[0].predicted_s == pytest.approx(times.time_s[0])
    assert found.rows[1].predicted_s == pytest.approx(times.time_s[1:].sum())
    assert found.rows[0].low_s < found.rows[0].predicted_s < found.rows[0].high_s
    assert found.not_expressible == {
        "dropout does nothing in inference": 1, "operator where": 1, "data type 'int64'": 1,
        "device A1000: not in the catalog": 1, "shapes that cannot be read": 1, "a result of one element": 1,
        "time is not a positive number": 1}


def test_missing_columns_are_named(tmp_path):
    path = tmp_path / "ops.csv"
    pandas.DataFrame([row("add", [[8, 64]], (8, 64), 10.0)]).drop(columns=["bw_us", "op"]).to_csv(path)
    with pytest.raises(InputError, match=r"ops\.csv: columns op, bw_us missing"):
        validate.validate(path)


@pytest.mark.parametrize(("columns", "why"), [
    ({"num_k_heads": 4, "chunk_size": 64}, "linear attention; kernels that can be predicted are gemm, attention"),
    ({"shape": "hidden=1024"}, "operators by name; ")])
def test_kernels_without_a_model_are_counted(tmp_path, columns, why, capsys):
    from mixfleet.cli import main

    path = tmp_path / "other.parquet"
    pandas.DataFrame({"source": ["a"] * 3, "gpu": "L4", "op": "gru", "dtype": "fp32", "time_us": 7.0, **columns}
                     ).to_parquet(path)
    (reason, rows), = validate.validate(path).not_expressible.items()
    assert rows == 3
    assert reason.startswith(why)
    assert main(["validate", str(path)]) == 0
    assert "3 rows: " in capsys.readouterr().out


def test_a_backward_of_a_norm_reads_and_writes_more(tmp_path):
    path = tmp_path / "norm.parquet"
    sizes = {"source": "neusight", "backend": "torch", "gpu": "L4", "op": "layernorm", "dtype": "fp32"}
    pandas.DataFrame([{**sizes, "rows": 32768, "cols": 8192, "direction": d, "time_us": 9e3} for d in ("fwd", "bwd")]
                     ).to_parquet(path)
    forward, backward = (r.ceiling_s for r in validate.validate(path).rows)
    assert backward / forward == pytest.approx(3 / 2)


def test_a_sample_is_drawn_alike_each_time(tmp_path, capsys):
    from mixfleet.cli import main

    path = tmp_path / "norm.csv"
    sizes = {"source": "neusight", "backend": "torch", "gpu": "L4", "op": "softmax", "dtype": "fp32", "cols": 512}
    pandas.DataFrame([{**sizes, "rows": 100 + i, "time_us": 9.0} for i in range(30)]).to_csv(path)
    some, again, every = (validate.validate(path, sample=n) for n in (7, 7, 40))
    assert [r.where for r in some.rows] == [r.where for r in again.rows]
    assert len(some.rows) == 7
    assert some.not_expressible == {"not drawn: --sample 7": 23}
    assert len(every.rows) == 30
    assert main(["validate", str(path), "--sample", "7"]) == 0
    assert "23 rows: not drawn" in capsys.readouterr().out
    ops = tmp_path / "ops.csv"
    pandas.DataFrame([row("tanh", [[8, 64]], (8, 64), 10.0)]).to_csv(ops)
    with pytest.raises(InputError, match="--sample is for files of kernel times"):
        validate.validate(ops, sample=3)
