"""Writes tests/packed: quantized matrices as other programs store them, with the values that these programs compute.

    pip install -e ".[goldens]" && python scripts/write_packed.py [--autogptq DIR] [--autoawq DIR]

Each file has a quantized matrix, as the tensors of a module called m; the same matrix in floating point, as the tensor
`values`; and, as metadata, the quantization_config that a model's config.json would have. compressed-tensors packs and
unpacks most of the matrices. AutoGPTQ and AutoAWQ can no longer be installed with current torch, so the script loads
their layer modules from source checkouts (0.8.0.dev0 in the folder --autogptq, 0.2.9 in the folder --autoawq).
"""

import argparse
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

FOLDER = Path(__file__).parent.parent / "tests" / "packed"
INT4, INT8, FP8 = ({"num_bits": bits, "type": kind} for bits, kind in ((4, "int"), (8, "int"), (8, "float")))
GROUP, CHANNEL = {"strategy": "group", "group_size": 16}, {"strategy": "channel"}
ASYMMETRIC = {"symmetric": False}
DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
# name -> shape [out, in], dtype of the weight and its scales, format, and the quantization of weights and of
# activations
CASES: dict[str, tuple[tuple[int, int], torch.dtype, str, dict[str, Any], Any]] = {
    "int4-group": ((12, 32), torch.bfloat16, "pack-quantized", INT4 | GROUP, None),
    "int4-group-asymmetric": ((12, 32), torch.float16, "pack-quantized", INT4 | GROUP | ASYMMETRIC, None),
    "int4-channel-odd": ((5, 13), torch.float32, "pack-quantized", INT4 | CHANNEL, None),
    "int4-tensor": ((5, 16), torch.float32, "pack-quantized", INT4 | {"strategy": "tensor"}, None),
    "int8-channel-asymmetric": ((6, 10), torch.float32, "pack-quantized", INT8 | CHANNEL | ASYMMETRIC, None),
    "int8-plain": ((6, 10), torch.bfloat16, "int-quantized", INT8 | CHANNEL, DYNAMIC),
    "int8-plain-asymmetric": ((6, 32), torch.float32, "int-quantized", INT8 | GROUP | ASYMMETRIC, DYNAMIC),
    "int4-plain": ((6, 32), torch.float32, "naive-quantized", INT4 | GROUP, None),
    "fp8-tensor": ((6, 10), torch.bfloat16, "float-quantized", FP8 | {"strategy": "tensor"}, None),
    "fp8-channel": ((6, 10), torch.float32, "float-quantized", FP8 | CHANNEL, None),
    "fp8-block": (
        (24, 32),
        torch.float32,
        "float-quantized",
        FP8 | {"strategy": "block", "block_structure": [16, 8]},
        None,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--autogptq", type=Path)
    parser.add_argument("--autoawq", type=Path)
    chosen = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    for number, name in enumerate(CASES):
        torch.manual_seed(number)
        write_compressed(name)
    if chosen.autogptq:
        for bits, size, ordered, dtype in (
            (4, 8, True, "float16"),
            (4, 16, False, "float32"),
            (8, -1, False, "float16"),
        ):
            torch.manual_seed(bits + size)
            write_gptq(chosen.autogptq, bits, size, ordered, getattr(torch, dtype))
    if chosen.autoawq:
        torch.manual_seed(0)
        write_awq(chosen.autoawq)


def save(name: str, tensors: dict[str, torch.Tensor], values: torch.Tensor, said: dict[str, Any]) -> None:
    found = {f"m.{key}": tensor.contiguous() for key, tensor in tensors.items()} | {"values": values.contiguous()}
    save_file(found, FOLDER / f"{name}.safetensors", {"quantization_config": json.dumps(said)})


def write_compressed(name: str) -> None:
    """Writes the case `name`: a matrix as compressed-tensors stores it, and as compressed-tensors decompresses it."""
    shape, dtype, form, weights, activations = CASES[name]
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=activations, format=form)
    args = scheme.weights
    weight = torch.randn(shape, dtype=torch.float32)
    if args.group_size:
        tiles = weight.reshape(shape[0], -1, args.group_size)
    elif args.block_structure:
        rows, columns = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -shape[1] % columns, 0, -shape[0] % rows))
        tiles = padded.reshape(padded.shape[0] // rows, rows, -1, columns).transpose(1, 2).flatten(2)
    else:
        tiles = weight.reshape(1 if args.strategy == "tensor" else shape[0], 1, -1)
    scale, zero = calculate_qparams(tiles.amin(-1), tiles.amax(-1), args)
    scale = scale.reshape(-1) if args.strategy == "tensor" else scale
    state = {"weight": weight.to(dtype), "weight_scale": scale.to(dtype)}
    if not args.symmetric:
        state["weight_zero_point"] = zero
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(state, scheme)
    values = compressor.decompress(stored, scheme)["weight"]
    group = scheme.model_dump(mode="json")
    save(
        name,
        stored,
        values,
        {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}},
    )


def module_in(path: Path, name: str) -> Any:
    """Imports a module from a checkout without running its package's __init__."""
    package = name.split(".", maxsplit=1)[0]
    sys.modules[package] = types.ModuleType(package)
    sys.modules[package].__path__ = [str(path / package)]
    spec: Any = importlib.util.spec_from_file_location(name, path / f"{name.replace('.', '/')}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_gptq(checkout: Path, bits: int, size: int, ordered: bool, dtype: torch.dtype) -> None:
    """Writes a matrix as AutoGPTQ packs it, and its values, which AutoGPTQ's layer returns for an identity matrix.

    If `ordered`, inputs are assigned to groups in random order, as with AutoGPTQ's desc_act.
    """
    kind = module_in(checkout, "auto_gptq.nn_modules.qlinear.qlinear_cuda").QuantLinear
    out, into = 32, 32
    layer = kind(bits, size, into, out, bias=False, weight_dtype=dtype)
    groups = into // layer.group_size
    linear = torch.nn.Linear(into, out, bias=False, dtype=dtype)
    order = torch.randperm(into) if ordered else torch.arange(into)
    group = (order // layer.group_size).to(torch.int32)
    scales = torch.rand(out, groups) / 2**bits + 0.01
    zeros = torch.randint(1, 2**bits, (out, groups)).float()
    layer.pack(linear, scales.to(dtype), zeros.to(dtype), group)
    with torch.no_grad():
        values = layer(torch.eye(into, dtype=dtype)).T
    said = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": ordered, "sym": False}
    stored = {key: getattr(layer, key) for key in ("qweight", "qzeros", "scales", "g_idx")}
    save(f"gptq-int{bits}{'-ordered' if ordered else ''}", stored, values, said)


def write_awq(checkout: Path) -> None:
    """Writes a matrix as AutoAWQ packs it, and as AutoAWQ unpacks it."""
    module = module_in(checkout, "awq.modules.linear.gemm")
    out, into, size = 32, 16, 8
    linear = torch.nn.Linear(into, out, bias=False, dtype=torch.float16)
    zeros = torch.randint(0, 16, (into // size, out))
    scales = (torch.rand(into // size, out) / 16 + 0.01).half()
    layer = module.WQLinear_GEMM.from_linear(linear, 4, size, scales=scales, zeros=zeros)
    values = module.dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, 4, size).T
    said = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm", "zero_point": True}
    save("awq", {key: getattr(layer, key) for key in ("qweight", "qzeros", "scales")}, values, said)


if __name__ == "__main__":
    main()
