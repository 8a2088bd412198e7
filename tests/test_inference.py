"""Inference steps are sums of kernels: additive in layers, and files count what they cannot express."""

import gzip

import numpy as np
import pytest

from mixfleet.calibrate import inference, validate
from mixfleet.cluster import device_named
from mixfleet.cost import query
from mixfleet.errors import InputError

H100 = device_named("H100-SXM")
SMALL = inference.Shape(3, 1024, 16, 4, 64, 2816, 32000)


def test_the_shape_of_a_catalog_model():
    assert inference.shape_of("qwen3-32b") == (64, 5120, 64, 8, 128, 25600, 151936)
    assert inference.shape_of(inference.serving_model("Qwen2.5-14B-arxiv_8")).head_dim == 128
    with pytest.raises(InputError, match="'bert-large' is no dense decoder"):
        inference.shape_of("bert-large")


def test_a_step_is_linear_in_layers():
    three, five, nine = (inference.step_s(SMALL._replace(layers=n), H100, 1, 4, 512, 512) for n in (3, 5, 9))
    assert nine - five == pytest.approx(2 * (five - three))
    assert three > 0


def test_prefill_and_decode_ask_for_different_kernels():
    seen = []

    def record(kind, columns, device, **_):
        rows = np.size(columns.get("m", 1))
        seen.append((kind, columns))
        return query.Times(*[np.full(rows, 2.0)] * 5, np.zeros(rows, int), np.ones(rows, bool))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inference.query, "predict", record)
        # per layer 4 products, attention, rope, activation, 2 norms; and the last norm and the head
        assert inference.step_s(SMALL, H100, 1, 5, 1, 300.5) == pytest.approx(2.0 * (3 * 9 + 2))
    kinds = [kind for kind, _ in seen]
    assert kinds == ["gemm", "attention", "stream", "stream", "stream"]
    assert seen[0][1]["m"] == [5, 5, 5, 5, 5]
    assert seen[0][1]["n"] == [(16 + 8) * 64, 1024, 2 * 2816, 1024, 32000]
    assert (seen[1][1]["op"], seen[1][1]["q_len"], seen[1][1]["kv_len"]) == ("attn_decode", 1, 300.5)


def test_tensor_parallel_steps_add_all_reduces():
    one, two = (inference.step_s(SMALL, H100, t, 2, 2048, 2048) for t in (1, 2))
    assert one / 2 < two < one * 1.5


HEAD = ("source,gpu,model,framework,dtype,batch,input_len,output_len,tp,pp,prefill_ms,total_prefill_tokens,"
        "decode_step_ms")
LINES = [HEAD, "a,H100-SXM,Qwen2.5-14B-some_8,sglang,bf16,8,1024,64,1,1,500,8192,11.5",
         "b,A100-PCIe-40GB,bert_large,torch2.1 eager,fp32,8,512,0,1,1,150,,",
         "b,H100-SXM,switch4,torch2.1 eager,fp32,8,512,0,1,1,10,,", "a,Q9000,Llama-3.1-8B-x,sglang,bf16,8,9,9,1,1,5,,"]


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_of_inference_steps(tmp_path, packed):
    path = tmp_path / ("steps.csv.gz" if packed else "steps.csv")
    text = "\n".join(LINES) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    found = validate.validate(path)
    assert [(r.where, r.source, r.measured_s) for r in found.rows] == [
        (0, "a prefill", 0.5), (0, "a decode_step", 0.0115), (1, "b prefill", 0.15)]
    assert all(0.5 < r.predicted_s / r.measured_s < 2 for r in found.rows)
    assert sum(found.not_expressible.values()) == 2
    assert any("switch4" in why for why in found.not_expressible)
