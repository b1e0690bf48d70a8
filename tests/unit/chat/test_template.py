"""Templates: the variables that Hugging Face's tokenizers pass them, generation marks, and what the sandbox refuses."""

import datetime
import pickle

import pytest

from trainer.chat import sandbox as template_sandbox
from trainer.chat.template import DEFAULT, Template, TemplateFailed
from trainer.config.errors import UserError
from trainer.data.chat_files import ChatTemplate

SAID = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


def rendered(text: str, messages=SAID, tools=None, special=("</s>",), **settings):
    return Template(ChatTemplate(text, "here"), NAMES, special).render(messages, tools, **settings)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}", "<s>|</s>|"),
        (
            "{% for m in messages %}\n    {% if loop.first %}{% continue %}{% endif %}\n{{ m.content }}\n{% endfor %}",
            "Yo\n",
        ),
        ("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}", "user"),
        ("{{ {'a': '<é>', 'b': [1, none]} | tojson }}", '{"a": "<é>", "b": [1, null]}'),
        ("{{ messages[0] | tojson(indent=1) }}", '{\n "role": "user",\n "content": "Hi"\n}'),
        ("{{ strftime_now('%d %b %Y') }}", "01 Jan 2026"),
        ("{{ tools[0].name }}{{ tools is none }}", "fFalse"),
        ("{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}", "2"),
        ("{{ messages[0].missing is defined }}{{ add_generation_prompt }}", "FalseFalse"),
        ("{% macro f(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}{{ f(messages[1]) }}", "Yo"),
    ],
)
def test_what_templates_can_use(text, said):
    assert rendered(text, tools=[{"name": "f"}]).text == said


def test_generation_is_marked_also_in_a_macro_and_nested():
    for text in (
        "é{% generation %}{{ messages[1].content }}{% endgeneration %}!",
        "{% macro f() %}é{% generation %}Yo{% endgeneration %}{% endmacro %}{{ f() }}!",
        "é{% generation %}Y{%- generation -%}o{% endgeneration %}{% endgeneration %}!",
        "{% set x %}é{% generation %}Yo{% endgeneration %}{% endset %}{{ x }}!",
    ):
        found = rendered(text)
        assert found.text == "éYo!"
        assert found.learnt == ((1, 3),)


def test_names_of_special_tokens_in_messages_are_found():
    messages = [{"role": "user", "content": "a </s></s>"}]
    found = rendered("{{ messages[0].content }}</s>{% if '</s>' in messages[0].content %}!{% endif %}", messages)
    assert found.text == "a </s></s></s>!"
    assert found.plain == ((2, 6), (6, 10))
    upper = rendered("{{ messages[0].content.split('</s>')[0] }}|", messages)
    assert (upper.text, upper.plain) == ("a |", ())


def test_a_template_of_parts_gets_parts():
    text = "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
    assert rendered(f"{text}|{{% endfor %}}").text == "Hi|Yo|"
    both = "{% for m in messages %}{{ m.content if m.content is string else 'parts' }}|{% endfor %}"
    assert rendered(both).text == "Hi|Yo|"


def test_a_content_of_null_is_none_and_prints_nothing():
    """DeepSeek's templates check whether the content is none; other templates print it."""
    text = "{% for m in messages %}{{ 'calls' if m.content is none }}{{ m['content'] | trim }}|{% endfor %}"
    null = [SAID[0], {"role": "assistant", "content": None}]
    assert rendered(text, null).text == "Hi|calls|"
    assert rendered("{{ 'content' in messages[1] }}{{ messages[1] | tojson }}", null).text.endswith('"content": null}')


def test_the_default_template():
    template = Template(DEFAULT, NAMES)
    assert template.render(SAID).text == "<s>User:\nHi\nAssistant:\nYo</s>\n"
    assert template.render(SAID).learnt == ((23, 29),)
    assert template.render(SAID[:1], prompt=True).text == "<s>User:\nHi\nAssistant:\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{{ raise_exception('only\x1b two roles') }}", r"only\\x1b two roles"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "__class__"),
        ("{{ namespace.__init__.__globals__ }}", "__init__"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "no attribute __class__"),
        ("{{ namespace(__call__=1) }}", "no attribute __call__"),
        ("{% include '/etc/passwd' %}", "loader"),
        ("{{ messages[7].content }}", "no element 7|has no"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{{ 1 // 0 }}", "by zero"),
        ("{{ 'x' * 1000000000000 }}", "more than"),
        ("{{ ['x'] * 1000000000000 }}", "more than"),
        ("{{ 9 ** 9999999999 }}", "below 1000"),
        ("{{ '%99999999d' % 1 }}", "three digits"),
        ("{% for i in range(100001) %}x{% endfor %}", "Range"),
        ("{% for i in range(99999) %}{{ 'x' * 999999 }}{% endfor %}", "more than"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ lipsum() }}", "lipsum"),  # returns random text
        ("{{ 'abcdef' | truncate(1) }}", "expected length"),
        ("{{ '\\ud800' }}", "surrogates not a"),
    ],
)
def test_what_templates_cannot_do(text, said):
    with pytest.raises(
        TemplateFailed, match=f"the chat template \\(here\\) cannot render the conversation: .*({said})"
    ):
        rendered(text)


GROWN = "{%% set n = namespace(x=%s) %%}{%% for i in range(60) %%}{%% set n.x = %s %%}{%% endfor %%}{{ n.x }}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{{ 1.5|round(-999999999) }}", "round has"),
        (GROWN % ("9", "n.x * n.x"), "bits"),
        (GROWN % ("'a'.encode()", "n.x + n.x"), "it makes more"),
        (GROWN % ("'a'", "n.x ~ n.x"), "it makes more"),
        (GROWN % ("['a']", "[n.x, n.x]"), "it makes more"),
        (GROWN % ("['a']", "(n.x, n.x)"), "it makes more"),
        (GROWN % ("['a']", "{'a': n.x, 'b': n.x}"), "it makes more"),
        (GROWN % ("['a']", "dict(a=n.x, b=n.x)"), "it makes more"),
        ("{{ 'a'.encode() * 10000000000 }}", "it makes more"),
        ("{{ 'a'.ljust(1000000000) }}", "it makes more"),
        ("{{ (1).to_bytes(1000000000, 'big') }}", "it makes more"),
        ("{{ 'a'|center(1000000000) }}", "it makes more"),
        ("{{ [1]|map('center', 1000000000)|list }}", "it makes more"),
        ("{{ [1]|batch(1000000000, 'x')|list }}", "it makes more"),
        ("{{ [1]|tojson(indent=1000000000) }}", "tojson indents"),
        ("{{ '{:>1000000000}'.format(1) }}", "three digits"),
        ("{{ '{:>{}}'.format(1, 1000000000) }}", "three digits"),
        ("{{ '%1000000000d'|format(1) }}", "three digits"),
        ("{{ '%1000000000d'.encode() % 1 }}", "three digits"),
        ("{% set a = 'a' * 1000000 %}{{ a.replace('a', a) }}", "it makes more"),
        ("{% set a = 'a' * 1000000 %}{{ a|join(a) }}", "it makes more"),
        ("{% set a = 'a' * 1000000 %}{{ a.translate({97: a}) }}", "it makes more"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "it takes more"),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}", "it takes more"),
    ],
)
def test_a_small_template_makes_no_large_text(text, said, monkeypatch):
    monkeypatch.setattr(template_sandbox, "SECONDS", 0.2)
    with pytest.raises(TemplateFailed, match=f"{said}|it takes more"):
        rendered(text)


LONG = "a few words, " * 400_000  # 5 MB


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("{{ messages[0].content | trim }}", LONG.strip()),
        ("{{ '<tool>' ~ messages[0].content }}", "<tool>" + LONG),
        ("{{ '%s: %s' % ('x', messages[0].content) }}", "x: " + LONG),
        ("{{ messages[0].content.split(' ') | length }}", str(len(LONG.split(" ")))),
        ("{% for m in messages[1:] + messages[::-1] %}{{ m.role }}{% endfor %}", "assistantassistantuser"),
        (
            "{% set n = namespace(t=[]) %}{% for m in messages %}{% set n.t = n.t + [m] %}{% endfor %}{{ n.t|length }}",
            "2",
        ),
        ("{% for i in range(1200) %}{% for j in range(1000) %}{% endfor %}{% endfor %}", ""),
        ("{{ '**%s**: %s' % ('a', 1) }}", "**a**: 1"),
        ("{{ 'Cutoff 2023-10, today {}'.format('x') }}", "Cutoff 2023-10, today x"),
        ("{{ 'Copyright 2024 %s' | format('x') }}", "Copyright 2024 x"),
        ("{{ '{{\"name\": \"{}\"}}'.format('n') }}", '{"name": "n"}'),
    ],
)
def test_a_long_conversation_is_no_bomb(text, made):
    said = [{"role": "user", "content": LONG}, {"role": "assistant", "content": LONG}]
    assert Template(ChatTemplate(text, "here"), NAMES).render(said).text == made


def test_limits_of_a_conversation_begin_again_with_the_next_one(monkeypatch):
    monkeypatch.setattr(template_sandbox, "MADE_TOGETHER", 5_000_000)
    monkeypatch.setattr(template_sandbox, "TURNS", 1000)
    template = Template(ChatTemplate("{% for i in range(700) %}{% endfor %}{{ 'a' * 4000000 }}", "here"), NAMES)
    assert {len(template.render(SAID).text) for _ in range(3)} == {4000000}
    with pytest.raises(UserError, match=r"here: a chat template of more than 131,072 characters"):
        Template(ChatTemplate("a" * (1 << 17) + "a", "here"), NAMES)


@pytest.mark.parametrize(
    "text", ["{% for m in messages %}", "{{ 'a", "{% generation %}", "{% nothing %}", "{{ [1]|random }}"]
)
def test_a_text_that_is_no_template(text):
    with pytest.raises(UserError, match=r"here, line 1 is not a chat template in Jinja: "):
        Template(ChatTemplate(text, "here"), NAMES)


@pytest.mark.parametrize(
    "text",
    [
        "{% continue %}",
        "{% for m in messages %}{% generation %}{% break %}{% endgeneration %}{% endfor %}",
        "{% macro f(a, a) %}{% endmacro %}",
        "{{ f(a=1, a=2) }}",
        "{% if x %}" * 120 + "{% endif %}" * 120,
        "{% for a in [1] %}" * 25 + "{% endfor %}" * 25,
        "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
    ],
)
def test_a_template_that_python_cannot_compile(text):
    with pytest.raises(UserError, match=r"^here is not a chat template in Jinja: \S.{10,}"):
        Template(ChatTemplate(text, "here"), NAMES)


def test_the_date_is_fixed_in_training():
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", "here")
    assert Template(template, {}).render(SAID).text == "2026-01-01"
    assert Template(template, {}, today=True).render(SAID).text == datetime.date.today().isoformat()


def test_a_template_is_pickled_for_other_processes():
    template = Template(DEFAULT, NAMES, ["</s>"])
    again = pickle.loads(pickle.dumps(template))
    assert again.render(SAID) == template.render(SAID)
    assert again.marks_generation
