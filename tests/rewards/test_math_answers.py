"""Comparison of mathematical answers: pairs written by hand, and thousands of generated pairs with a known result."""

import sys
import time
from collections import Counter
from collections.abc import Callable

import pytest

from penstock.stages.rewards.builtin.math_answer import MAX_LENGTH, grade_math, last_boxed, same_answer
from penstock.stages.rewards.hub import get_builtin_reward
from penstock.storage.samples.sample import Sample
from tests.rewards.answer_pairs import generate_pairs

SAME = [
    (r"\begin{pmatrix} -1 \\ 3 \end{pmatrix}", r"\begin{pmatrix}-1\\3\end{pmatrix}"), (r"\pi r^2", r"\pi r^{2}"),
    (r"2\cdot x+1", "2x+1"), (r"12\,\text{cm}", "12"), ("413_8", "413_{8}"), (r"x \le 3", r"x \leq 3"),
    (r"\dbinom{5}{2}", r"\binom{5}{2}"), (r"\alpha + \beta", r"\beta+\alpha"), (r"20\text{ cm}^2", "20"),
    ("5 million", "5000000"), ("2, 1", "1 and 2"), (r"(1,\infty)", "x>1"), (r"\frac{1}{2}", r"\frac{1}{2}."),
    (r"x \in [-2,7]", "[-2,7]"), (r"2:30\text{ p.m.}", "2:30 p.m."), (r"10\sqrt{3}\text{ units}", r"10\sqrt3"),
    (r"-\frac{1}{2}x + 3", r"3 - \frac{x}{2}"), ("3-.5x", r"-\frac12x+3"), (r"\frac{3\sqrt{3}}{2}", r"\frac32\sqrt3"),
    (r"1.5\sqrt{3}", r"\frac{3\sqrt{3}}{2}"), (r"\frac{\sqrt{6}-\sqrt{2}}{4}", r"\sin 15^\circ"),
    ("2^{n}-1", "2^n - 1"), ("p - q", "-q+p"), (r"\{x : x > 2\}", r"(2,\infty)"), (r"\{x\mid x > 2\}", "x>2"),
    (r"33\frac{1}{3}\%", r"\frac{100}{3}\%"), (r"\frac{11}{2}\%", r"5.5\%"),
    (r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}", r"\begin{pmatrix} \frac{1}{5} \\ -\frac{18}{5} \end{pmatrix}"),
    (r"\left( \frac{3}{2}, -\frac{1}{3}\right)", "(3/2,-1/3)"),
    (r"(3, \frac{\pi}{2})", r"\left( 3, \frac{\pi}{2} \right)"), ("y = -x^2 + 4", "4 - x^2"),
    (r"70 \sqrt{2} \text{ cm}", r"70\sqrt{2}"), ("0", "0.0"), (r"\frac{2\pi}{3} \text{ radians}", r"\frac{2\pi}{3}"),
    (r"1 \pm \sqrt{19}", r"1+\sqrt{19}, 1-\sqrt{19}"), ("3x^2 - 5x + 2", "(3x-2)(x-1)"), ("3,5,7", "3, 5, 7"),
    ("100,200", "100, 200"), (r"\{100,200\}", r"\{100, 200\}"), ("a^2 b", "b a^2"), (r"\sqrt{x^2+1}", "(x^2+1)^{1/2}"),
    ("|x|", r"\sqrt{x^2}"), ("C_1 e^x + C_2 e^{-x}", "C_2e^{-x}+C_1e^{x}"), (r"\ln|x| + C", r"C+\ln\left|x\right|"),
    (r"\frac{x^2}{2} + C", "0.5x^2+C"), (r"\arctan(x)", r"\tan^{-1} x"), ("1{,}000{,}000", "10^6"),
    ("1 000 000", "1e6"), (r"5 \times 10^{-3}", "0.005"), ("3^{1/3}", r"\sqrt[3]{3}"),
    (r"-\sqrt[3]{2}", r"\sqrt[3]{-2}"), (r"\binom{n}{2}", r"\frac{n(n-1)}{2}"),
    (r"2\mathbf{i} + 3\mathbf{j}", r"3\mathbf{j}+2\mathbf{i}"), (r"O(n \log n)", r"O(n\log n)"),
    (r"\mathcal{O}(n^2)", "O(n^2)"), (r"P = \frac{1}{6}", r"\frac16"), ("AB = 5", "5"),
    (r"12 \text{ and } 15", "12, 15"), (r"\text{Yes}", "yes"), ("True", r"\text{true}"), (r"\frac{1}{10}", r"10 \%"),
    ("2 hours 30 minutes", r"2\text{ hours }30\text{ minutes}"), (r"5 \text{m}^2", r"5\,\mathrm{m}^2"),
    (r"9.8\ \mathrm{m/s^2}", r"9.8\text{ m/s}^2"), (r"3\times10^8\ \text{m/s}", "300000000"),
    ("25 °C", r"25^\circ\text{C}"), (r"\[ 5 \]", "5"), (r"\boldsymbol{5}", "5"),
    (r"\frac{5}{12}\approx 0.4167", r"\frac{5}{12}"), (r"x=\frac{5}{12}\approx 0.4167", r"\frac{5}{12}"),
    (r"\underline{5}", "5"), (r"\pi r^2 h", r"h\pi r^2"),
    (r"\frac{-b \pm \sqrt{b^2-4ac}}{2a}", r"x=\frac{-b\pm\sqrt{b^2 - 4ac}}{2a}"),
    (r"\text{14 cm}^2", r"14\,\text{cm}^2"), (r"\$32{,}348", "32348"), (r"5,\!040", "5040"), (r"\text{(A) }5", "A"),
    (r"\textbf{(C)}\ 12", "C"),
    (r"\frac{\pi}{4}+\frac{k\pi}{2}, k\in\mathbb{Z}", r"\frac{\pi}{4} + \frac{k\pi}{2},\ k \in \mathbb{Z}"),
    (r"x \le -2 \text{ or } x \ge 3", r"(-\infty,-2]\cup[3,\infty)"), (r"-2 \leq a \leq 3", "[-2,3]"),
    (r"k > \frac{1}{4}", r"(\frac14,+\infty)"), (r"\frac{x^2}{4}+\frac{y^2}{3}=1", "3x^2+4y^2=12"),
    ("x+y-1=0", "y=1-x"), (r"2\sin\left(2x+\frac{\pi}{6}\right)", r"2\sin(2x+\frac{\pi}{6})"),
    (r"\sqrt{2}/2", r"\frac{1}{\sqrt{2}}"), (r"2+\sqrt{3}", r"\sqrt{3}+2"), (r"\frac{1}{2-\sqrt3}", r"2+\sqrt3"),
    ("2x(x+3)", "2x^2+6x"), ("a_{n}=2n-1", "2n-1"), (r"\left\{\frac{1}{2},3\right\}", r"\{3, 0.5\}"),
    (r"(0,1)\cup(1,2)", r"(0,1) \cup (1,2)"), (r"\mathbb{R}\setminus\{0\}", r"\mathbb{R} \setminus \{ 0 \}"),
    (r"\{1,2,\ldots,10\}", r"\{1, 2, \dots, 10\}"), (r"6 \text{ cm}^3", "6"), (r"5\text{ feet}", "5 ft"),
    (r"\frac{7}{8}\text{ of a mile}", r"\frac{7}{8}\text{ of a mile}"), (r"\text{June 20}", "June 20"),
    (r"2^{\frac{1}{2}}", r"\sqrt{2}"), (r"\sqrt{2}\,i", r"i\sqrt{2}"), ("1+2i", "2i+1"), (r"\overline{z}", r"\bar z"),
    (r"\vec{a}+\vec{b}", r"\vec b+\vec a"), (r"-1\frac{1}{2}", "-1.5"),
    (r"\frac{\sqrt{5}-1}{2}", r"\frac{-1+\sqrt5}{2}"), (r"\tfrac{1}{2}(\sqrt{5}-1)", r"\frac{\sqrt{5}-1}{2}"),
    (r"\log_{3}5", r"\log_3(5)"), ("10x^{3}", "10x³"), (r"\frac{3}{4}\,\mathrm{kg}", "0.75 kg"),
    (r"\text{increasing on }(0,\infty)", r"\text{increasing on } (0, \infty)"),
    (r"\begin{cases} x=1 \\ y=2 \end{cases}", r"\begin{cases}x=1\\y=2\end{cases}"),
    (r"\begin{vmatrix} a & b \\ c & d \end{vmatrix}", r"\begin{vmatrix}a&b\\c&d\end{vmatrix}"),
    ("[1,2,3]", "[1, 2, 3]"), (r"\sum_{k=1}^{n} k^2", r"\sum_{k=1}^n k^2"),
    (r"\int_0^1 x\,dx", r"\int_{0}^{1} x \, dx"), (r"30^{\circ}", r"30^\circ"), (r"\angle A = 30^\circ", "30"),
    (r"\cos\theta=\frac{3}{5}", r"\frac35"), (r"2\frac{1}{2}\text{ hours}", "2.5"), ("two", r"\text{two}"),
    ("3/4 cup", r"\frac{3}{4}"), (r"-\infty", r"- \infty"), (r"+\infty", r"\infty"), ("(a+b)^2", "a^2+2ab+b^2"),
    ("xy+yz+zx", "zx + xy + yz"), ("a b c", "abc"), (r"\lambda_1 + \lambda_2", r"\lambda_{2}+\lambda_{1}"),
    (r"\frac{m v^2}{2}", r"\frac{1}{2}mv^2"), ("E=mc^2", "E = m c^{2}"), (r"\frac{GMm}{r^2}", "GMm/r^2"),
    (r"\hbar\omega", r"\hbar \omega"), (r"\text{H}_2\text{O}", r"\mathrm{H_2O}"),
    (r"x\to\infty", r"x \rightarrow \infty"), ("A", r"\boxed{A}"), (r"\frac{1}{2}\ln 2", r"\ln\sqrt{2}"),
    (r"\sqrt{3}-\frac{\pi}{3}", r"-\frac{\pi}{3}+\sqrt 3"), (r"\frac{2}{\sqrt[3]{4}}", r"\sqrt[3]{2}"),
    (r"12\pi\text{ square inches}", r"12\pi"), ("4:5:6", "4 : 5 : 6"), ("{10}", "10"), (r"\,10\,", "10"), ("+3", "3"),
    (r"\frac{3}{10}", "30%"), ("7.0", "7"), ("007", "7"), (r"\sec^2 x", r"1+\tan^2 x"),
    (r"\frac{e^x-e^{-x}}{2}", r"\sinh x"),
]  # fmt: skip
DIFFERENT = [
    ("(1,2)", "[1,2]"), ("x^2", "x^3"), (r"\frac13", "0.33"), (r"2\pi", "6.28"), ("AB", "BA"), ("a-b", "b-a"),
    ("(x-1)^2", "x^2-1"), (r"\sqrt{x^2}", "x"), (r"\ln x", r"\log_{10} x"), ("10^{10}", "10^{10}+1"),
    ("2^{100}", "1267650600228229401496703205375"), (r"\infty", r"-\infty"), (r"\emptyset", "0"), ("cat", "act"),
    ("5 kg", "5 g"), ("i", "1"), (r"\text{A and B}", r"\text{A and C}"), ("n(n+1)", "n(n-1)"), ("x<3", r"x\le3"),
    ("y=x", "y=-x"), ("x=1", "x=-1"), ("3!", "3"), (r"\frac{1}{25}", r"\frac{12}{5}"), (r"\frac12", r"\frac{12}{1}"),
    (r"\sqrt{2}", "2"), ("1,2", "1,2,2"), (r"\text{May 5}", r"\text{May 6}"), ("5 m", "5 s"), ("12:30", "12:03"),
    ("3.14", r"\pi"), (r"\sqrt{-4}", "2"), ("0.999", "1"), ("1", "1.0000001"), ("a_1", "a_2"), ("x_1", "x"),
    (r"e^\pi", r"\pi^e"), (r"\{1,2\}", "(1,2)"), ("x>3", "x<-3"), ("B", "8"), ("O", "0"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"), ("10", "100"), ("-x", "x"),
    ("x+1=0", "x+2=0"), ("100", "10^3"), ("5%", "5/10"), ("2", "x=3"), ("f(2)", "f(3)"), ("[0,1)", "(0,1]"),
    (r"30^\circ", r"60^\circ"), ("1:2", "1:3"), ("a", "b"), (r"\alpha", r"\beta"), (r"\sin x", r"\sin y"),
    ("sqrt(2)", "sqrt(3)"), ("no", "on"), ("even", "odd"), ("12 apples", "13 apples"), (r"\frac{x}{y}", r"\frac{y}{x}"),
    ("2,3", "(2,3)"), (r"\text{Not A}", r"\text{A}"), ("5,000", "5"), ("5,000", "5.000"), ("1.5", "15"),
    (r"x \ge 2", r"x \ge 3"), (r"k\pi, k\in\mathbb{Z}", r"2k\pi, k\in\mathbb{Z}"), (r"3\times 4", "34"), ("2^3", "8.5"),
    ("-2^2", "4"), ("(-2)^2", "-4"), (r"\sum_{k=1}^n k", r"\sum_{k=1}^n k^2"), (r"\int_0^1 x dx", r"\int_0^2 x dx"),
    ("x", "2x"), ("1/2", "2"), ("6/3/2", "4"), ("|x|", "x"), ("7", "7i"), ("10 cm", "10 cm^2"),
    (r"20\text{ cm}^2", "400"), ("413_8", "413"), ("5 million", "5"), ("7 3/4", "73/4"),
    ("__import__('os').system('x')", "0"), ("9" * 400, "8" * 400), ("", "0"),
]  # fmt: skip


def test_error_rates_on_generated_pairs_are_low() -> None:
    """Allow at most 1 % false negatives and 0.1 % false positives; docs/rewards.md has the figures."""
    pairs = generate_pairs()
    num_equal = sum(pair.equal for pair in pairs)
    wrong = [pair for pair in pairs if same_answer(pair.left, pair.right) != pair.equal]
    false_negatives = [pair for pair in wrong if pair.equal]
    false_positives = [pair for pair in wrong if not pair.equal]
    kinds = Counter((pair.kind, pair.equal) for pair in wrong)
    assert len(pairs) >= 3000
    assert len(false_negatives) <= 0.01 * num_equal, kinds
    assert len(false_positives) <= 0.001 * (len(pairs) - num_equal), kinds


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_error_rates_on_other_seeds_are_low(seed: int) -> None:
    pairs = generate_pairs(200, seed)
    wrong = Counter(pair.equal for pair in pairs if same_answer(pair.left, pair.right) != pair.equal)
    assert wrong[True] <= 0.01 * len(pairs) / 2 and wrong[False] <= 0.001 * len(pairs) / 2


def test_generated_pairs_depend_only_on_the_seed() -> None:
    assert generate_pairs(4) == generate_pairs(4) != generate_pairs(4, seed=1)


@pytest.mark.parametrize(("left", "right"), SAME)
def test_equal_pairs_by_hand_are_equal_both_ways(left: str, right: str) -> None:
    assert same_answer(left, right) and same_answer(right, left)


@pytest.mark.parametrize(("left", "right"), DIFFERENT)
def test_different_pairs_by_hand_are_different_both_ways(left: str, right: str) -> None:
    assert not same_answer(left, right) and not same_answer(right, left)


def test_equation_whose_last_side_is_the_label_is_equal_but_not_the_reverse() -> None:
    assert same_answer("a+b=7", "7") and same_answer(r"\binom{5}{2} = 10", "10")
    assert not same_answer("25", "x^2+y^2=25")


@pytest.mark.parametrize(
    "text",
    [
        r"9^{9^{9}}", r"9^{9^{9^{9}}}", r"10^{10^{100}}", "9!!!!!!", "1000000!", r"2^{2^{2^{2^{2^2}}}}", r"x^{9^{9^9}}",
        r"e^{e^{e^{e^e}}}", "9" * 900, r"\sin(10^{300})", "1e999999999", "(" * 450 + "1" + ")" * 450, "-" * 900 + "1",
        r"\sqrt{" * 140 + "2" + "}" * 140, r"\binom{10^9}{10^8}", r"((1+x)^{9999})^{9999}", "1/" * 400 + "3",
        "2" + "^2" * 300, r"\pm" * 200 + "1", ",".join(map(str, range(200))), "|" * 500, r"\frac" * 140 + "1" * 300,
        r"\left\{" * 100, "a_{" * 200 + "}" * 200, r"\lfloor 10^{5000}\pi\rfloor", "10^{1000000}", "0.5^{-999999}",
    ],
)  # fmt: skip
def test_expensive_answer_gets_0_without_being_computed(text: str) -> None:
    """Count Python calls instead of seconds; computing the power would exceed the time limit of a test."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        grades = grade_math(rf"\boxed{{{text}}}", "5"), grade_math(r"\boxed{5}", text)
    finally:
        sys.setprofile(None)
    assert grades == (0.0, 0.0) and calls < 1_000_000


def test_answer_longer_than_max_length_is_compared_as_text() -> None:
    long = "1+" * MAX_LENGTH + "1"
    assert same_answer(long, long) and not same_answer(long, long + "+0")


def test_evaluated_integers_requires_a_number_for_an_integer_label() -> None:
    grade = get_builtin_reward("math").function
    product = Sample("0", "g", "0", 0, response=r"\boxed{17\cdot 23}", label="391")
    assert grade(product) == 1.0 and grade(product, evaluated_integers=True) == 0.0
    for number in ("391", "391.0", "x = 391", r"391\text{ cm}", r"\$391", "391."):
        assert grade_math(rf"\boxed{{{number}}}", "391", evaluated_integers=True) == 1.0, number
    for expression in (r"\frac{782}{2}", "391+0", r"\sqrt{391^2}", "20^2-9"):
        assert grade_math(rf"\boxed{{{expression}}}", "391", evaluated_integers=True) == 0.0, expression
    assert grade_math(r"\boxed{\frac{2}{4}}", r"\frac12", evaluated_integers=True) == 1.0
    boxed = get_builtin_reward("boxed_math").function  # passes the option on, and finds no box inside the box
    assert boxed(Sample("0", "g", "0", 0, response=r"\boxed{5}", label="5"), evaluated_integers=True) == 0.0


def cpu_seconds(function: Callable[[str], object], text: str) -> float:
    def measure() -> float:
        start = time.process_time()
        function(text)
        return time.process_time() - start

    return min(measure() for _ in range(3))


@pytest.mark.parametrize(
    ("name", "piece"),
    [("math", piece) for piece in (r"\boxed{", r"\boxed", r"\boxed$", r"\boxed{1} ", "{", " ")]
    + [("gpqa", piece) for piece in (" ", "answer ", "A)", "answer is ((", "<|x|>", "((")]
    + [("f1", " ")],
)
def test_grading_time_is_linear_in_the_response(name: str, piece: str) -> None:
    """Allow 24 times the CPU time for 8 times the text; quadratic time would be 64 times."""
    grade = get_builtin_reward(name).function

    def grade_response(response: str) -> object:
        return grade(Sample("0", "g", "0", 0, response=f"</think>answer is{response}!", label="5"))

    size = 2000
    while (short := cpu_seconds(grade_response, piece * (size // len(piece)))) < 0.0005 and size < 32_000:
        size *= 2
    assert cpu_seconds(grade_response, piece * (8 * size // len(piece))) < 24 * max(short, 0.0005)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{a}\boxed b", "b"),
        (r"\boxed {7}", "7"),
        (r"\boxed 7$ and \boxed{", "7"),
        (r"} \boxed{1}", "1"),
        (r"{\boxed{1}", "1"),
        (r"\boxed", None),
        (r"\boxed$", None),
    ],
)
def test_last_boxed_of_unusual_text_returns_the_last_complete_box(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer
