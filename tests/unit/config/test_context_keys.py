"""The keys of context parallelism: checks before and after the devices are known, the kernels of each strategy, keys
without effect, and MaxText's command."""

import re

import pytest

from trainer.config.capabilities import context_keys, kernels
from trainer.config.capabilities.all_keys import step_keys
from trainer.config.capabilities.context_keys import KEYS, SIZES, parts, token_order
from trainer.config.capabilities.vocab_tiles import tile_bytes
from trainer.config.effects import without_effect_here
from trainer.config.errors import UserError
from trainer.config.family import Facts
from trainer.config.load import load
from trainer.config.maxtext import verdicts
from trainer.config.resolve import resolve
from trainer.config.resume import LAYOUT
from trainer.config.schema import schema
from trainer.maxtext.command_line import parse
from trainer.maxtext.convert import TRAIN, convert
from trainer.maxtext.rows import DIFFERS, SAME, by_kind

# Written out, because the defaults of base.yml may change.
BASE = (
    "dataset_type=synthetic vocab_size=4096 max_target_length=128 per_device_batch_size=8 eval_per_device_batch_size=0 "
    "base_emb_dim=192 base_num_query_heads=6 base_num_kv_heads=2 base_mlp_dim=512 base_num_decoder_layers=2 "
    "head_dim=32 gradient_accumulation_steps=1 steps=100 eval_interval=50 enable_dropout=true dropout_rate=0 "
    "attention_dropout_rate=0 attention=autoselected attention_type=global dtype=auto packing=true "
)
FOUR = f"{BASE}ici_context_parallelism=4 "
USP = f"{BASE}context_parallel_strategy=usp ici_context_parallelism=2 ici_context_usp_ulysses_parallelism=2 "
OWN, IN_ORDER = "decoder_block=nowhere:Block", "context_parallel_load_balance=false"
DROPOUT = "dropout_rate=0.1"
ROUNDING = "quantization=int8 bwd_stochastic_rounding=uniform"
ACCEPTANCE = "mtp_num_layers=1 mtp_eval_target_module=1"
EXPERTS = "decoder_block=mixtral num_experts=4 num_experts_per_tok=2 base_moe_mlp_dim=64 capacity_factor=1"
SWAP = ("dual_chunk_swap", 4)
# A MaxText command line with context parallelism, with additions of MaxText's users.
MAXTEXT = (
    "python3 -m maxtext.trainers.pre_train.train base.yml run_name=r dataset_type=synthetic model_name=llama2-7b "
    "ici_context_parallelism=4 ici_fsdp_parallelism=-1 context_parallel_strategy=all_gather packing=false "
    "per_device_batch_size=0.25 max_target_length=32768 steps=10"
)


def resolved(words: str, platform: str = "cpu", devices: int = 8):
    return resolve(load(words.split()).config, device_count=devices, platform=platform)


def mistakes(words: str, platform: str = "cpu", devices: int = 8) -> list[str]:
    with pytest.raises(UserError) as caught:
        resolved(words, platform, devices)
    return str(caught.value).split("\n  ")[1:]


def test_these_are_the_keys_of_context_parallelism():
    names = {name for name in schema().keys if re.search("context_(par|usp)", name)}
    assert names == {*KEYS, *SIZES}
    assert set(KEYS) <= set(LAYOUT)  # a run may resume with another strategy
    assert set(KEYS) <= set(step_keys())
    assert set(kernels.STRATEGIES) == set(schema().keys["context_parallel_strategy"].choices)
    assert {context_keys.CHUNKS, "striped", "auto"} == set(schema().keys["context_parallel_reorder_strategy"].choices)


@pytest.mark.parametrize(
    ("words", "count", "order"),
    [
        (BASE, 1, None),
        (f"{BASE}context_parallel_strategy=ring", 1, None),
        (FOUR, 4, SWAP),
        (f"{FOUR}context_parallel_reorder_strategy=striped", 4, ("striped", 4)),
        (f"{FOUR}{IN_ORDER}", 4, None),
        (f"{FOUR}dcn_context_parallelism=2 ici_context_parallelism=2 dcn_data_parallelism=1", 4, SWAP),
        (f"{FOUR}context_parallel_strategy=ring", 4, ("dual_chunk_swap", 4)),
        (f"{FOUR}context_parallel_strategy=ring packing=false", 4, SWAP),
        (f"{FOUR}context_parallel_strategy=ring context_parallel_reorder_strategy=dual_chunk_swap", 4, SWAP),
        (f"{FOUR}context_parallel_strategy=ulysses base_num_query_heads=8", 4, None),
        (USP, 4, ("dual_chunk_swap", 2)),
        (f"{USP}ici_context_parallelism=1", 2, None),
        (f"{FOUR}context_parallel_strategy=usp", 4, ("dual_chunk_swap", 4)),  # inner axis of one device: a ring
    ],
)  # fmt: skip
def test_how_rows_are_split_and_ordered(words, count, order):
    loaded = load(words.split()).config
    config = resolve(loaded, device_count=8, platform="cpu")
    assert (parts(config), token_order(config)) == (parts(loaded), token_order(loaded)) == (count, order)
    assert config.context_parallel_reorder_strategy == (
        order[0] if order else loaded["context_parallel_reorder_strategy"]
    )
    assert resolve(config, device_count=8, platform="cpu") == config


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            f"{FOUR}max_target_length=132",
            r"max_target_length=132 \(command line\): .* parts: 2 x context 4 = 8 chunks of dual_chunk_swap; "
            "nearest: 128 or 136$",
        ),
        (f"{FOUR}max_target_length=130", "parts: 2 x context 4 = 8 chunks of dual_chunk_swap; nearest: 128 or 136$"),
        (f"{FOUR}max_target_length=3 per_device_batch_size=1", "8 chunks of dual_chunk_swap; nearest: 8$"),
        (f"{FOUR}max_target_length=130 {IN_ORDER}", "context 4 by the rule of activation.*; nearest: 128 or 132$"),
        (f"{FOUR}max_target_length=130 context_parallel_reorder_strategy=striped", "parts: context 4 by the "
            "rule of .*; nearest: 128 or 132$"),
        (
            f"{FOUR}max_target_length=132 context_parallel_strategy=ulysses base_num_query_heads=8 "
                f"ici_tensor_sequence_parallelism=2",
            "context 4 x tensor_sequence 2 = 8 by the rule of activation_norm_length; nearest: 128 or 136$",
        ),
        (
            f"{USP}max_target_length=130",
            "context 2 x context_usp_ulysses 2 = 4 by the rule of activation_.*; nearest: 128 or 132$",
        ),
        (
            f"{FOUR}context_parallel_strategy=ulysses",
            r'base_num_query_heads=6 .*"ulysses" \(command line\): context 4 does not divide 6 query heads, .*; '
            "nearest: context 3 or 6$",
        ),
        (
            f"{FOUR}context_parallel_strategy=ulysses base_num_query_heads=12 ici_tensor_parallelism=2",
            r"context 4 does not divide 12 / \(tensor 2\) = 6 query heads, .*; nearest: context 3 or 6$",
        ),
        (
            f"{USP}ici_context_usp_ulysses_parallelism=4",
            "context_usp_ulysses 4 does not divide 6 query heads, .*; nearest: context_usp_ulysses 3 or 6$",
        ),
        (
            f"{USP}context_parallel_strategy=ring",
            r'"ring" .*, ici_context_usp_ulysses_parallelism=2 .*: only the strategy usp uses the mesh axis '
            "context_usp_ulysses; set context_parallel_strategy=usp, or use the axis context$",
        ),
        (f"{FOUR}{DROPOUT}", rf"dropout_rate=0.1 \(command line\), .* drawn by a token's position .*; set {IN_ORDER}$"),
        (f"{FOUR}attention_dropout_rate=0.1", f"drawn by a token's position .*; set {IN_ORDER}$"),
        (f"{FOUR}{ROUNDING}", f'bwd_stochastic_rounding="uniform" .*: rounding is drawn by .*; set {IN_ORDER}$'),
        (f"{FOUR}{ACCEPTANCE}", f"mtp_eval_target_module=1 .*: the acceptance rate compares .*; set {IN_ORDER}$"),
        (f"{FOUR}{OWN}", f"a custom block may mix tokens .*; set {IN_ORDER}$"),
        (f"{FOUR}{EXPERTS} sparse_matmul=false", "are dropped depends on the whole row; set sparse_matmul=true$"),
        (f"{FOUR}batch_invariant=true", r"parallelism=4 \(command line\): each device must have whole rows"),
        (
            f"{FOUR}logical_axis_rules=[[activation_q_length,[]],[activation_norm_length,tensor_sequence]]",
            r"the rule of activation_q_length must be \[context,context_usp_ulysses\]; the rule of "
            r"activation_norm_length must begin with \[context,context_usp_ulysses\] where rows .*; leave it out$",
        ),
        (
            f"{FOUR}ici_tensor_parallelism=2 logical_axis_rules=[[activation_kv_heads,[]],"
            "[activation_kv_length,[context,tensor]]]",
            r"the rule of activation_kv_length must be \[context,context_usp_ulysses\]; the rules of activation_heads "
            "and activation_kv_heads must be the same where rows .*; leave it out$",
        ),
        (  # usp uses the last axis of the rule as the inner one
            f"{USP}ici_context_usp_ulysses_parallelism=1 logical_axis_rules=[[activation_q_length,context]]",
            r"the rule of activation_q_length must be \[context,context_usp_ulysses\] where rows .*; leave it out$",
        ),
        (f"{FOUR}logical_axis_rules=[[activation_batch,[data,context]]]", "both use mesh axis context"),
    ],
)  # fmt: skip
def test_what_is_wrong_without_devices(words, message):
    with pytest.raises(UserError, match=message) as caught:
        load(words.split())
    assert "1 mistake in" in str(caught.value)


def test_a_family_with_a_recurrent_state_is_refused(monkeypatch):
    """Even if the tokens are not reordered."""
    facts = Facts("nowhere:FAMILY", recurrent=True)
    monkeypatch.setattr(context_keys, "facts_of", lambda config: facts)
    with pytest.raises(UserError, match=r'decoder_block="llama2" .*: its blocks have a recurrent state'):
        load(f"{FOUR}{IN_ORDER}".split())
    load(BASE.split())


@pytest.mark.parametrize(
    "words",
    [
        *(f"{FOUR}{IN_ORDER} {words}" for words in (DROPOUT, ROUNDING, ACCEPTANCE, "max_target_length=132")),
        *(f"{FOUR}{words}" for words in (f"{ACCEPTANCE} eval_interval=-1", f"{DROPOUT} enable_dropout=false")),
        f"{FOUR}{EXPERTS} sparse_matmul=true",
        f"{FOUR}{DROPOUT} context_parallel_strategy=ulysses base_num_query_heads=8",
        f"{FOUR}context_parallel_strategy=ring context_parallel_reorder_strategy=striped max_target_length=132",
        f"{FOUR}context_parallel_strategy=ulysses base_num_query_heads=8 base_num_kv_heads=2",  # which get repeated
        f"{FOUR}ici_tensor_sequence_parallelism=2",
        f"{FOUR}logical_axis_rules=[[activation_q_length,context],[activation_kv_length,context]]",
        f"{FOUR}logical_axis_rules=[[activation_kv_heads,[]]]",  # tensor has one device
        f"{BASE}{DROPOUT} {ROUNDING} {ACCEPTANCE} max_target_length=131",  # no row is split
    ],
)
def test_neighbours_of_mistakes_pass(words):
    resolved(words)


def test_sizes_that_follow_from_the_devices_are_checked_with_them():
    words = f"{BASE}ici_context_parallelism=-1 ici_fsdp_parallelism=1 max_target_length=116 base_emb_dim=190 "
    assert mistakes(f"{words}{DROPOUT}") == [
        "max_target_length=116: a row must divide into equal parts: 2 x context 8 = 16 chunks of dual_chunk_swap; "
        "nearest: 112 or 128",
        "enable_dropout=true dropout_rate=0.1 attention_dropout_rate=0.0: dropout is drawn by a token's "
        f"position in the row, which reordering changes; set {IN_ORDER}",
        "base_emb_dim=190: context 8 by the rule of embed does not divide it in token_embedder/embedding [vocab 4096, "
        "embed 190]; nearest: 184 or 192",
    ]
    found = mistakes(f"{words}context_parallel_strategy=ulysses batch_invariant=true max_target_length=128")
    assert found[0].startswith("batch_invariant=true: context has 8 devices: each device must have whole rows")
    (found,) = mistakes(f"{words}context_parallel_strategy=ulysses base_emb_dim=192 max_target_length=128")
    assert found.startswith(
        "base_num_query_heads=6 context_parallel_strategy=ulysses: context 8 does not divide 6 query heads"
    )


def test_the_nearest_values_fit():
    """Every number that a message suggests is accepted."""

    def wrong(*words: str) -> list[str]:
        try:
            load([*f"{BASE}packing=false".split(), *words])
        except UserError as error:
            return str(error).split("\n  ")[1:]
        return []

    refused = 0
    for strategy, order in (("all_gather", ""), ("all_gather", IN_ORDER), ("ulysses", ""), ("usp", "")):
        exchanged = "ici_context_usp_ulysses_parallelism" if strategy == "usp" else "ici_context_parallelism"
        for ring, inner in ((2, 3), (3, 1), (4, 1), (4, 2), (1, 4)):
            sizes = (f"ici_context_parallelism={ring}", f"ici_context_usp_ulysses_parallelism={inner}")
            split = (f"context_parallel_strategy={strategy}", *sizes[: 1 + (strategy == "usp")], *order.split())
            for length in (6, 24, 50, 100):
                for line in wrong(*split, f"max_target_length={length}"):
                    refused += 1
                    near = re.findall(r"\d+", line.partition("nearest: ")[2])
                    of_row = line.startswith("max_target_length")
                    key, more = ("max_target_length", ()) if of_row else (exchanged, ("max_target_length=720",))
                    again = [line for size in near for line in wrong(*split, *more, f"{key}={size}")]
                    assert near
                    assert not [other for other in again if other.partition("=")[0] == line.partition("=")[0]]
    assert refused > 20


@pytest.mark.parametrize(
    ("words", "cpu", "gpu", "tpu"),
    [
        ("", "blockwise", "blockwise", "splash"),
        ("max_target_length=512", *["dot_product"] * 3),
        ("max_target_length=1152", *["blockwise"] * 3),
        ("attention=dot_product", *["dot_product"] * 3),
        ("context_parallel_strategy=ring", *["blockwise"] * 3),
        ("context_parallel_strategy=ring attention=flash", *["blockwise"] * 3),
        ("context_parallel_strategy=ring max_target_length=128", *["blockwise"] * 3),
        ("context_parallel_strategy=usp max_target_length=128", *["blockwise"] * 3),
        ("context_parallel_strategy=ulysses", "blockwise", "cudnn_flash_jax", "splash"),
        (
            "context_parallel_strategy=ulysses max_target_length=1152 attention=flash",
            "blockwise",
            "cudnn_flash_jax",
            "splash",
        ),
        ("context_parallel_strategy=ulysses max_target_length=128", *["dot_product"] * 3),
    ],
)
def test_the_kernel_of_each_strategy(words, cpu, gpu, tpu):
    for platform, kernel in {"cpu": cpu, "gpu": gpu, "tpu": tpu}.items():
        words = f"{FOUR}max_target_length=1024 base_num_query_heads=8 dtype=bfloat16 {words}"
        assert resolved(words, platform).attention == kernel, platform


@pytest.mark.parametrize(
    ("words", "platform", "message"),
    [
        ("context_parallel_strategy=ring attention=dot_product", "cpu", "dot_product does not support "
            "context_parallel_strategy=ring (only b"),
        ("context_parallel_strategy=usp attention=splash", "tpu", "splash does not support "
            "context_parallel_strategy=usp (only blockwise);"),
        (
            "attention=flash dtype=bfloat16",
            "gpu",
            "is cudnn_flash_jax, which does not support context_parallel_strategy=all_gather (only dot_product, "
                "blockwise, splash);",
        ),
        (
            "attention=splash max_target_length=1152",
            "tpu",
            "max_target_length=1152 (only multiples of 512 for 4 devices, 128 tokens each; nearest: 1024 or 1536);",
        ),
    ],
)  # fmt: skip
def test_a_kernel_that_a_strategy_does_not_take_is_refused_by_name(words, platform, message):
    (found,) = mistakes(f"{FOUR}max_target_length=1024 {words}", platform)
    assert message in found


def test_the_start_of_a_run_says_why_there_is_no_kernel():
    config = resolved(f"{FOUR}context_parallel_strategy=ring max_target_length=1024", "tpu")
    assert (
        kernels.why_no_kernel(config, {}, "tpu")
        == "splash does not support context_parallel_strategy=ring (only blockwise)"
    )


@pytest.mark.parametrize(
    ("words", "key", "reason"),
    [
        (
            f"{BASE}context_parallel_strategy=ring",
            "context_parallel_strategy",
            "context and context_usp_ulysses have one device",
        ),
        (f"{BASE}context_parallel_load_balance=true", "context_parallel_load_balance", "have one device"),
        (f"{BASE}context_parallel_reorder_strategy=striped", "context_parallel_reorder_strategy", "have one device"),
        (f"{FOUR}context_parallel_reorder_strategy=striped {IN_ORDER}", "context_parallel_reorder_strategy", IN_ORDER),
        (
            f"{FOUR}context_parallel_strategy=ulysses base_num_query_heads=8 context_parallel_reorder_strategy=striped",
            "context_parallel_reorder_strategy",
            "context_parallel_strategy=ulysses gives each",
        ),
        (
            f"{FOUR}context_parallel_strategy=ulysses base_num_query_heads=8 {IN_ORDER}",
            "context_parallel_load_balance",
            "context_parallel_strategy=ulysses gives each",
        ),
        (
            f"{USP}ici_context_parallelism=1 context_parallel_reorder_strategy=striped",
            "context_parallel_reorder_strategy",
            "it applies only to the mesh axis context, which has one",
        ),
    ],
)
def test_keys_without_effect(words, key, reason):
    (warning,) = (line for line in load(words.split()).warnings if not line.startswith("packing"))
    assert warning.startswith(f"{key}=")
    assert "has no effect" in warning
    assert reason in warning


def test_keys_without_effect_on_any_devices_are_told_once():
    loaded = load(f"{BASE}context_parallel_strategy=ring context_parallel_reorder_strategy=striped".split())
    config = resolve(loaded.config, device_count=1, platform="cpu")
    assert without_effect_here(config, loaded.changed, loaded.config) == []


def test_keys_without_effect_on_these_devices():
    loaded = load(f"{BASE}ici_context_parallelism=-1 ici_fsdp_parallelism=1 context_parallel_strategy=ring".split())
    for devices, expected in ((1, 1), (8, 0)):
        config = resolve(loaded.config, device_count=devices, platform="cpu")
        lines = without_effect_here(config, loaded.changed, loaded.config)
        assert sum(line.endswith("no effect: no row is split over devices here") for line in lines) == expected


@pytest.mark.parametrize(
    "words",
    [
        f"{FOUR}context_parallel_strategy=ring context_parallel_reorder_strategy=striped",
        f"{USP}context_parallel_load_balance=true context_parallel_reorder_strategy=striped",
    ],
)
def test_with_split_rows_the_keys_have_an_effect(words):
    assert not [line for line in load(words.split()).warnings if "context" in line]


def test_fewer_rows_than_devices():
    assert resolved(f"{FOUR}per_device_batch_size=0.25").per_device_batch_size == 0.25
    assert mistakes(f"{FOUR}per_device_batch_size=0.3") == [
        "per_device_batch_size=0.3: 0.3 x 8 devices = 2.4 rows, not a whole multiple of 2 (fsdp 2 by the rule of "
        "activation_batch); nearest: 0.25 or 0.5"
    ]


def test_tiles_of_the_loss_cut_the_tokens_of_a_device():
    """Two rows, each split over four devices: each device has 32 tokens, and gathers the whole head for them."""
    words = f"{FOUR}per_device_batch_size=0.25 eval_interval=-1 num_vocab_tiling="
    assert resolved(f"{words}32").num_vocab_tiling == 32
    (found,) = mistakes(f"{words}64")
    assert found == "num_vocab_tiling=64: 32 tokens per device in a microbatch are not a multiple of it; nearest: 32"
    assert tile_bytes(resolved(f"{words}1")) == (32 * 4096 * 4, 4096 * 192 * 4)


def test_the_command_of_maxtext():
    more = "context_sharding=context ulysses_context_sharding=context_usp_ulysses ring_scan_unroll=2 "
    more += "use_tokamax_splash=True"
    found = convert(
        parse(
            [
                *MAXTEXT.split(),
                *more.split(),
                "context_parallel_load_balance=true",
                "context_parallel_reorder_strategy=auto",
            ]
        ),
        TRAIN,
    )
    assert found.runs
    kinds = {name: {row.given.partition("=")[0] for row in rows} for name, rows in by_kind(found.rows).items()}
    assert kinds[verdicts.NEEDLESS] == {word.partition("=")[0] for word in more.split()}
    assert kinds[DIFFERS] == {"dataset_type", "packing", "per_device_batch_size"}
    assert {*KEYS, "ici_context_parallelism"} <= kinds[SAME]
    config = resolve(found.loaded.config, device_count=8, platform="tpu")
    assert (config.attention, token_order(config)) == ("splash", SWAP)


@pytest.mark.parametrize("word", ["context_sharding=expert", "custom_mesh_and_rule=cp-as-ep"])
def test_what_maxtext_does_with_other_axes_is_refused(word):
    found = convert(parse([*MAXTEXT.split(), word]), TRAIN)
    assert not found.runs
    assert [row.given for row in by_kind(found.rows)[verdicts.NEVER]] == [word]
