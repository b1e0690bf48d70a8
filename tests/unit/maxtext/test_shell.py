"""Commands are read as bash reads them, or refused."""

import random
import shutil
import subprocess

import pytest

from trainer.config.errors import UserError
from trainer.maxtext.command_line import as_text, parse

COMMAND = "python3 -m MaxText.train "
# Statements that set variables, and words that use the variables.
CASES = [
    ('ARGS="a=1 b=2"', "$ARGS c=3"),
    ('ARGS="a=1 b=2"', '"$ARGS" c=$ARGS'),
    ('A="  a=1  "', "x=$A$A y${A}z"),
    ('A=""', '$A "$A" x=$A'),
    ("O=(a=1 b=2)", '"${O[@]}" p"${O[@]}"s ${O[*]} "${O[*]}" $O ${O[1]} "${O[9]}"'),
    ("O=(a=1 'b=2 3'); O+=(c='x y' \"d=4\")", '"${O[@]}" | ${O[@]}'.replace("| ", "")),
    ("O=()", '"${O[@]}" x"${O[@]}" a=1'),
    ("O=(\n  a=1 # a note\n  b='#2'\n)", '"${O[@]}"'),
    ("A=1; A+=2; O=(x); O+=y", "a=$A o=$O"),
    ("A=1; B=$A; A=2", "a=$A b=$B"),
    ("A=1 B=$A; O=(p q); C=${O[@]} D=$O", "$A $B c=$C d=$D"),
    ('A="x y"; B=$A; export C="$A"; declare -a O=($A "$A")', '$B "$C" "${O[@]}"'),
    ("A=a; unset A", "x=$A y"),
    ("N=7", "a=$((N * (2 + 1) / 5)) b=$((${N} % 3)) c=$(( 2-N )) d=$((-N))"),
    ("N=-1", "a=$((2-N)) b=$((N*3))"),
    ("A=1; B=", "a=${A:-9} b=${B:-9} c=${B-9} d=${A:?no}"),
    ("A=1", r"'a=A$' a=\$ \"x\" 'it'\''s' 'b$|c'"),
    ("A=1", r'''"a=\$ \"c\" \d \\" x"y"'z' ""'''),
    ("A='x*'", 'a=$A b="$A" c=[1,2] d=x*'),
    ("A=1 && B=2", "a=$A b=$B 2>/dev/null x"),
    ("A=a # A=b\n# A=c", "x=$A#y"),
]
PARTS = [
    *(
        "${A}",
        '"$A"',
        "${B}",
        '"${B}x"',
        "${C}",
        '"$C"',
        "${O[@]}",
        '"${O[@]}"',
        '"${O[*]}"',
        "${O}",
        "${O[1]}",
        "'q r'",
    ),
    *("x=", "y", r"\ ", '""', "''", "$((N+1))", '"$((N))"', "${E:-d}", " ", " ", "\t", "${O[*]}", "${E}", '"$E"'),
]
VARIABLES = "A='a=1 b=2'; B=b; C='  c  d '; O=('o 1' p '' q=2); N=4; E=; A+=z; O+=(r\\ s)"
# Commands that are refused, and the part that the message must name.
REFUSED = {
    'O=(a=1); O[1]=b=2; {}"${{O[@]}}"': "$O: one of its elements is set separately",
    "A=1; {}a=$(echo $A)": "$(echo $A)",
    "A=1; {}a=`echo $A`": "`echo $A`",
    "A=1; {}a=${{A%x}}": "${A%x}",
    "A=; {}a=${{A:-x y}}": "${A:-x y}",
    "{}steps={{1,2}}": "steps={1,2}",
    "{}/data/*": "/data/*",
    "F=/data/*; {}$F": "/data/*",
    "if x; then A=1; else A=2; fi; {}a=$A": "$A is set under a condition",
    "[ x ] && A=1; {}a=$A": "$A is set under a condition",
    "x || A=1; {}a=$A": "$A is set under a condition",
    "x | A=1; {}a=$A": "$A is set under a condition",
    "(A=1); {}a=$A": "$A is set under a condition",
    "f() {{ A=1; }}; {}a=$A": "$A is set under a condition",
    "for A in 1 2; do {}a=$A; done": "$A is set under a condition",
    "case x in a) A=1;; *) A=2;; esac; {}a=$A": "$A is set under a condition",
    "read A; {}a=$A": "$A is set under a condition",
    "if x; then export A=1; fi; {}a=1": "$A is set under a condition",
    "A=$(date); B=x$(echo $A); {}b=$B": "$(echo $A)",
    "A=1 {}a=$A": "$A: a shell expands a command's words before it applies A=",
    "M_STEPS=3; {}a=1": "M_STEPS is not exported",
    "IFS=,; {}a=1": "IFS",
    "{}a=$'x\\n'": "$'x",
    "{}a='$A'": "a=$A",
    '{}a="\\$A"': "a=$A",
    "A='$B'; B=1; {}a=$A": "a=$B",
    "{}a=<your name> b=1": "<your name>",
    "{}a=1 <<EOF\nx\nEOF": "<<",
    "N=M; {}a=$((N+1))": "$((N+1))",
    "{}a=1\n  b=2": "b=2",
}


def words_of_bash(cases):
    script = "".join(f"( {given}\nprintf '%s\\0' x {words}\n)\nprintf '\\1'\n" for given, words in cases)
    done = subprocess.run(["bash", "-c", script], capture_output=True, timeout=60)
    return [text.split("\0")[1:-1] for text in done.stdout.decode().split("\1")[:-1]]


def words_of(given, words):
    return parse([f"{given}\n{COMMAND}x {words}"]).words[1:]


@pytest.mark.skipif(not shutil.which("bash"), reason="compares with bash")
def test_the_words_are_those_of_bash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chosen = random.Random(0)
    drawn = [(VARIABLES, "".join(chosen.choices(PARTS, k=chosen.randint(1, 7)))) for _ in range(300)]
    theirs = words_of_bash([*CASES, *drawn])
    assert len(theirs) == len(CASES) + len(drawn)
    for (given, words), expected in zip([*CASES, *drawn], theirs, strict=True):
        # Empty words are dropped: they name no key.
        assert words_of(given, words) == [word.lstrip() for word in expected if word.strip()], (given, words)


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_not_read_is_refused_by_name(text):
    with pytest.raises(UserError) as refusal:
        parse([text.format(COMMAND)])
    assert REFUSED[text] in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("for s in a b; do python3 -m MaxText.train steps=1; done", ["steps=1"]),
        ("if x; then A=1; fi; A=2; python3 -m MaxText.train a=$A", ["a=2"]),
        ('x && A=1 && python3 -m MaxText.train a=$A b=$B c="$(date "+%F %H")"', ["a=1", "b=$B", 'c=$(date "+%F %H")']),
        ("O=(a=1 b=2)\npython3 -m MaxText.train \\\n  base.yml ${O[@]} > log 2>&1 &", ["a=1", "b=2"]),
        ('A=1; xpk create --command "python3 -m MaxText.train a=$A b=2" --x', ["a=1", "b=2"]),
        ("R=x-$(date +%F 1); S=${Q:-1 2}; python3 -m MaxText.train a=$R b=$S", ["a=x-$(date +%F 1)", "b=${Q:-1 2}"]),
        ("C='python3 -m MaxText.train a=$A'; A=2; eval \"$C\"", ["a=2"]),
    ],
)
def test_what_a_script_runs(text, words):
    assert parse([text]).words == words


@pytest.mark.skipif(not shutil.which("bash"), reason="compares with bash")
def test_printed_words_are_the_same_words_for_bash():
    words = ['a=$(echo "1  2" b)', "b=x y", "c=${Q:-it is}", "d=$((1+Q)) $Q", 'e=`echo "f"`', "g=x\"y'$Q"]
    printed = as_text(words).replace("\\\n", "")
    assert words_of_bash([("Q=5", printed)]) == [["a=1  2 b", "b=x y", "c=5", "d=6 5", "e=f", "g=x\"y'5"]]
    assert parse([f"{COMMAND}{printed}"]).words == words
