"""Reading HLO text: instructions, shapes, loops, sources."""

import pytest

from trainer.aot import hlo
from trainer.aot.loops import trips

LOOP = """HloModule loop

FileNames
1 "/home/a/model.py"
2 "/usr/lib/site-packages/jax/kernel.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=1 end_column=9}
2 {file_name_id=2 function_name_id=1 line=99 end_line=99 column=1 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%body (p: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %p = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)S(1)}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8,16]{1,0} get-tuple-element(%p), index=1
  %one = s32[] constant(STEP)
  %next = s32[] add(%i, %one)
  %y = f32[8,16]{1,0} tanh(%x), metadata={op_name="jit(f)/while/body/tanh" stack_frame_id=2}
  ROOT %out = (s32[], /*index=1*/f32[8,16]{1,0}) tuple(%next, %y)
}

%condition (p: (s32[], f32[8,16])) -> pred[] {
  %p.1 = (s32[], f32[8,16]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %limit = s32[] constant(7)
  ROOT %less = pred[] compare(%i.1, %limit), direction=LT
}

ENTRY %main (a: f32[8,16]) -> f32[8,16] {
  %a = f32[8,16]{1,0} parameter(0)
  %zero = s32[] constant(FIRST)
  %start = (s32[], f32[8,16]{1,0}) tuple(%zero, %a)
  %loop = (s32[], f32[8,16]{1,0}) while(%start), condition=%condition, body=%body, backend_config={"a":"b(c"}
  %kernel = bf16[4,2]{1,0:T(8,128)(2,1)S(1)} custom-call(%a), custom_call_target="tpu_custom_call", attributes={m={
"words":"{\\"block_q\\": 512}"
}}, metadata={op_name="jit(f)/kernel"}
  ROOT %result = f32[8,16]{1,0} get-tuple-element(%loop), index=1
}
"""


def loop(step="1", first="0", **replaced):
    text = LOOP.replace("STEP", step).replace("FIRST", first)
    for old, new in replaced.values():
        assert old in text
        text = text.replace(old, new)
    module = hlo.parse(text)
    main = module.computations[module.entry]
    return module, trips(module, main, main.instructions["loop"])


def test_instructions_and_their_shapes():
    module, _ = loop()
    main = module.computations["main"]
    assert module.entry == "main"
    assert main.root == "result"
    kernel = main.instructions["kernel"]
    assert kernel.shapes == (hlo.Shape("bf16", (4, 2), 1),)
    assert kernel.shape.bytes == 16
    assert kernel.operands == ("a",)
    assert kernel.op_name == "jit(f)/kernel"
    assert kernel.attribute("custom_call_target") == '"tpu_custom_call"'
    assert main.instructions["loop"].called == ("condition", "body")
    body = module.computations["body"]
    assert [shape.space for shape in body.instructions["p"].shapes] == [0, 1]
    assert [user.name for user in body.users()["x"]] == ["y"]
    assert body.parameters == [body.instructions["p"]]


@pytest.mark.parametrize(
    ("dtype", "bits"), [("f32", 32), ("bf16", 16), ("pred", 8), ("s4", 4), ("u8", 8), ("f8e4m3fn", 8), ("token", 0)]
)
def test_bits_of_element_types(dtype, bits):
    assert hlo.bits(dtype) == bits


def test_a_source_is_the_innermost_line_outside_of_packages():
    module, _ = loop()
    assert module.source(module.computations["body"].instructions["y"]) == "/home/a/model.py:12"
    assert module.source(module.computations["main"].instructions["kernel"]) == ""


def test_trips_of_loops():
    assert loop()[1] == 7
    assert loop(step="2")[1] == 4
    assert loop(first="3")[1] == 4
    known = ('"a":"b(c"', '"known_trip_count":{"n":"5"}')
    assert loop(known=known)[1] == 5
    counted_by_unknown = ("%zero = s32[] constant(0)", "%zero = s32[] custom-call(%a)")
    assert loop(unknown=counted_by_unknown)[1] is None
    assert loop(step="-1")[1] is None
    assert loop(other=("direction=LT", "direction=NE"))[1] is None


def test_a_loops_counter_may_grow_in_several_steps_and_in_a_fusion():
    twice = "%half = s32[] add(%i, %one)\n  %next = s32[] add(%one, %half)"
    assert loop(twice=("%next = s32[] add(%i, %one)", twice))[1] == 4
    fused = "%next = s32[] fusion(%i), kind=kLoop, calls=%sum"
    function = """%sum (q: s32[]) -> s32[] {
  %q = s32[] parameter(0)
  %three = s32[] constant(3)
  ROOT %added = s32[] add(%q, %three)
}

ENTRY"""
    assert loop(fused=("%next = s32[] add(%i, %one)", fused), function=("ENTRY", function))[1] == 3
    assert loop(product=("add(%i, %one)", "multiply(%i, %one)"))[1] is None


def test_the_limit_of_a_loop_may_be_carried_along():
    text = LOOP.replace("STEP", "1").replace("FIRST", "0").replace("(s32[], f32[8,16]", "(s32[], s32[], f32[8,16]")
    text = text.replace("%limit = s32[] constant(7)", "%limit = s32[] get-tuple-element(%p.1), index=1")
    text = text.replace("tuple(%zero, %a)", "tuple(%zero, %nine, %a)")
    text = text.replace("  %zero =", "  %nine = s32[] constant(9)\n  %zero =")
    module = hlo.parse(text)
    main = module.computations["main"]
    assert trips(module, main, main.instructions["loop"]) == 9


# Modelled on the first product in README.md's example, as jax 0.10.2 and jax 0.12.0.1 print it.
RING = """HloModule ring

%ring_body (p: (bf16[1,256], u32[], (u32[], s32[2]))) -> (bf16[1,256], u32[], (u32[], s32[2])) {
  %p = (bf16[1,256]{1,0:T(8,128)(2,1)S(1)}, u32[]{:T(128)}, /*index=2*/(u32[]{:T(128)}, s32[2]{0:T(128)})) parameter(0)
ELEMENTS
  %one = u32[]{:T(128)} constant(1)
  %next = u32[]{:T(128)} add(COUNTER, %one), metadata={op_name="jit(step)/dot_general"}
  %sent = bf16[1,256]{1,0:T(8,128)(2,1)S(1)} collective-permute(ROWS), source_target_pairs={{0,1},{1,0}}
  ROOT %out = (bf16[1,256]{1,0}, u32[], /*index=2*/(u32[], s32[2]{0})) tuple(%sent, %next, PAIR)
}

%ring_cond (q: (bf16[1,256], u32[], (u32[], s32[2]))) -> pred[] {
  %q = (bf16[1,256]{1,0:T(8,128)(2,1)S(1)}, u32[]{:T(128)}, /*index=2*/(u32[]{:T(128)}, s32[2]{0:T(128)})) parameter(0)
  %limit = u32[]{:T(128)} constant(8), metadata={op_name="jit(step)/dot_general" stack_frame_id=148}
LEFT
  ROOT %less = pred[]{:T(512)} compare(LIMITED, %limit), direction=LT, backend_config={"flag_configs":[]}
}

ENTRY %main (a: bf16[1,256], b: (u32[], s32[2])) -> bf16[1,256] {
  %a = bf16[1,256]{1,0} parameter(0)
  %b = (u32[], s32[2]{0}) parameter(1)
  %zero = u32[] constant(0)
  %start = (bf16[1,256]{1,0}, u32[], (u32[], s32[2]{0})) tuple(%a, %zero, %b)
  %loop = (bf16[1,256]{1,0}, u32[], (u32[], s32[2]{0})) while(%start), condition=%ring_cond, body=%ring_body
  ROOT %result = bf16[1,256]{1,0} get-tuple-element(%loop), index=0
}
"""
OLDER = {
    "ELEMENTS": """  %rows = bf16[1,256]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%p), index=0
  %counter = u32[]{:T(128)} get-tuple-element(%p), index=1
  %pair = (u32[]{:T(128)}, s32[2]{0:T(128)}) get-tuple-element(%p), index=2""",
    "LEFT": "  %limited = u32[]{:T(128)} get-tuple-element(%q), index=1",
    "COUNTER": "%counter",
    "ROWS": "%rows",
    "PAIR": "%pair",
    "LIMITED": "%limited",
}
NEWER = {"ELEMENTS\n": "", "LEFT\n": "", "COUNTER": "%p#1", "ROWS": "%p#0", "PAIR": "%p#2", "LIMITED": "%q#1"}


def test_elements_of_tuples_in_both_spellings():
    older, newer = (hlo.parse(_replaced(RING, how)) for how in (OLDER, NEWER))
    for module in (older, newer):
        main = module.computations["main"]
        assert trips(module, main, main.instructions["loop"]) == 8
    for left, right in zip(older.computations.values(), newer.computations.values(), strict=True):
        for part in ("opcode", "shapes"):
            assert sorted(getattr(i, part) for i in left) == sorted(getattr(i, part) for i in right)


def _replaced(text, how):
    for old, new in how.items():
        assert old in text
        text = text.replace(old, new)
    return text


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        hlo.parse("func.func @main() {}")
