"""Comparison of mathematical answers: pairs written by hand, and thousands of generated pairs with a known result."""

import sys
from collections import Counter

import pytest

from penstock.stages.rewards.builtin import MAX_LENGTH, grade_math, last_boxed, same_answer
from penstock.stages.rewards.hub import get_builtin_reward
from penstock.storage.samples.sample import Sample
from tests.rewards.answer_near_misses import KINDS as NEAR_MISSES
from tests.rewards.answer_pairs import KINDS, SEED, generate_pairs

SAME = [
    (r"12\,\text{cm}", "12"), (r"\alpha + \beta", r"\beta+\alpha"), (r"20\text{ cm}^2", "20"),
    (r"\frac{1}{2}", r"\frac{1}{2}."), (r"10\sqrt{3}\text{ units}", r"10\sqrt3"),
    (r"-\frac{1}{2}x + 3", r"3 - \frac{x}{2}"), ("3-.5x", r"-\frac12x+3"), (r"\frac{3\sqrt{3}}{2}", r"\frac32\sqrt3"),
    (r"\frac{\sqrt{6}-\sqrt{2}}{4}", r"\sin 15^\circ"), ("p - q", "-q+p"), (r"\{x : x > 2\}", r"(2,\infty)"),
    (r"33\frac{1}{3}\%", r"\frac{100}{3}\%"), (r"\frac{11}{2}\%", r"5.5\%"),
    (r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}", r"\begin{pmatrix} \frac{1}{5} \\ -\frac{18}{5} \end{pmatrix}"),
    (r"\left( \frac{3}{2}, -\frac{1}{3}\right)", "(3/2,-1/3)"), ("y = -x^2 + 4", "4 - x^2"),
    (r"70 \sqrt{2} \text{ cm}", r"70\sqrt{2}"), (r"\frac{2\pi}{3} \text{ radians}", r"\frac{2\pi}{3}"),
    ("100,200", "100, 200"), ("a^2 b", "b a^2"), (r"\sqrt{x^2+1}", "(x^2+1)^{1/2}"),
    ("C_1 e^x + C_2 e^{-x}", "C_2e^{-x}+C_1e^{x}"), (r"\ln|x| + C", r"C+\ln\left|x\right|"),
    (r"\frac{x^2}{2} + C", "0.5x^2+C"), ("1{,}000{,}000", "10^6"), ("3^{1/3}", r"\sqrt[3]{3}"),
    (r"-\sqrt[3]{2}", r"\sqrt[3]{-2}"), (r"\binom{n}{2}", r"\frac{n(n-1)}{2}"), (r"O(n \log n)", r"O(n\log n)"),
    (r"\mathcal{O}(n^2)", "O(n^2)"), (r"P = \frac{1}{6}", r"\frac16"), ("AB = 5", "5"),
    (r"12 \text{ and } 15", "12, 15"), (r"\frac{1}{10}", r"10 \%"), (r"3\times10^8\ \text{m/s}", "300000000"),
    (r"\frac{5}{12}\approx 0.4167", r"\frac{5}{12}"), (r"x=\frac{5}{12}\approx 0.4167", r"\frac{5}{12}"),
    (r"\pi r^2 h", r"h\pi r^2"), (r"\frac{-b \pm \sqrt{b^2-4ac}}{2a}", r"x=\frac{-b\pm\sqrt{b^2 - 4ac}}{2a}"),
    (r"\$32{,}348", "32348"), (r"x \le -2 \text{ or } x \ge 3", r"(-\infty,-2]\cup[3,\infty)"),
    (r"k > \frac{1}{4}", r"(\frac14,+\infty)"), (r"\frac{x^2}{4}+\frac{y^2}{3}=1", "3x^2+4y^2=12"),
    ("x+y-1=0", "y=1-x"), (r"2+\sqrt{3}", r"\sqrt{3}+2"), ("a_{n}=2n-1", "2n-1"),
    (r"\left\{\frac{1}{2},3\right\}", r"\{3, 0.5\}"),
    (r"\frac{7}{8}\text{ of a mile}", r"\frac{7}{8}\text{ of a mile}"), (r"2^{\frac{1}{2}}", r"\sqrt{2}"),
    (r"\sqrt{2}\,i", r"i\sqrt{2}"), (r"\vec{a}+\vec{b}", r"\vec b+\vec a"), (r"-1\frac{1}{2}", "-1.5"),
    (r"\frac{\sqrt{5}-1}{2}", r"\frac{-1+\sqrt5}{2}"), (r"\tfrac{1}{2}(\sqrt{5}-1)", r"\frac{\sqrt{5}-1}{2}"),
    (r"\log_{3}5", r"\log_3(5)"), (r"\frac{3}{4}\,\mathrm{kg}", "0.75 kg"),
    (r"\begin{cases} x=1 \\ y=2 \end{cases}", r"\begin{cases}x=1\\y=2\end{cases}"),
    (r"\cos\theta=\frac{3}{5}", r"\frac35"), (r"2\frac{1}{2}\text{ hours}", "2.5"), ("3/4 cup", r"\frac{3}{4}"),
    (r"+\infty", r"\infty"), ("xy+yz+zx", "zx + xy + yz"), ("a b c", "abc"),
    (r"\lambda_1 + \lambda_2", r"\lambda_{2}+\lambda_{1}"), (r"\frac{m v^2}{2}", r"\frac{1}{2}mv^2"),
    (r"\frac{GMm}{r^2}", "GMm/r^2"), ("A", r"\boxed{A}"), (r"\frac{1}{2}\ln 2", r"\ln\sqrt{2}"),
    (r"\sqrt{3}-\frac{\pi}{3}", r"-\frac{\pi}{3}+\sqrt 3"), (r"\frac{2}{\sqrt[3]{4}}", r"\sqrt[3]{2}"),
    (r"12\pi\text{ square inches}", r"12\pi"), (r"\frac{3}{10}", "30%"), (r"\sec^2 x", r"1+\tan^2 x"),
    (r"\frac{e^x-e^{-x}}{2}", r"\sinh x"), ("approximately 3.14", "3.14"), (r"\approx 3.14\text{ cm}", "3.14 cm"),
    ("1 hour and 15 minutes", "75 minutes"), ("2:30 p.m.", "2:30 PM"),
    (r"\begin{cases}x=1\\y=2\end{cases}", "x=1, y=2"), ("(x,y)=(1,2)", "x=1,y=2"),
    ("(x,y)=(1,2)", r"\begin{cases}x=1\\y=2\end{cases}"),
    (r"2\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}2&4\\6&8\end{pmatrix}"),
    (r"5\frac{\text{m}}{\text{s}}", "5 m/s"), ("90 minutes", r"1\frac12 \text{ hours}"), (r"\frac{1}{4}", "25 percent"),
    ("noon", "noon"), (r"(-\infty,-2)\cup(-2,\infty)", r"\mathbb{R}\setminus\{-2\}"),
    (r"x\ne 2, x\ne 3", r"\mathbb R\setminus\{2,3\}"), (r"\{1,2,3\}", "1, 2, 3"),
    (r"\left\{-1,\frac12\right\}", r"x=-1 \text{ or } x=\frac12"),
    (r"\frac{\pi}{3}+2\pi k, k\in\mathbb{Z}", r"\frac{\pi}{3}+2\pi n, n\in\mathbb Z"),
    (r"\text{between } 3 \text{ and } 5", r"\text{between }3\text{ and }5"),
    (r"16\pi \text{ cubic inches}", r"16\pi\text{ in}^3"), (r"4.5\times10^{-7}\ \mathrm{m}", r"450\,\mathrm{nm}"),
    (r"1.6\times 10^{-19}\,\mathrm{C}", "1.6e-19 C"), ("36 km/h", "10 m/s"),
    (r"\lfloor n/2 \rfloor", r"\lceil (n-1)/2 \rceil"), (r"\frac{dy}{dx}=3x^2", "3x^2"), ("f'(x)=3x^2", "3x^2"),
    (r"\frac13\begin{bmatrix}3\\6\end{bmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"), ("A(1,2)", "(1,2)"),
    (r"\vec{v}=(1,2)", "(1,2)"), (r"3\text{ ft }6\text{ in}", "42 inches"), (r"\text{Option C}", "C"),
    (r"x>2 \text{ and } x<5", "(2,5)"), ("2<x<5", r"x\in(2,5)"),
    (r"\begin{cases} x+y=1 \\ x-y=2 \end{cases}", r"\begin{cases}x-y=2\\x+y=1\end{cases}"),
    (r"\ce{H2SO4}", r"\text{H}_2\text{SO}_4"), (r"20\ \mathrm{kg \cdot m/s}", r"20\text{ kg m/s}"),
    (r"n \equiv 1 \text{ or } 5 \pmod{6}", r"n\equiv \pm 1 \pmod 6"), ("x=3, y=4", "(3,4)"),
    (r"\text{Approximately }12.5\%", "12.5%"), ("350 cents", r"\$3.50"),
    (r"-\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}-1\\-2\end{pmatrix}"),
    (r"(2, \pi/3)", r"\left(2,\frac{\pi}{3}\right)"), (r"60\,\mathrm{min}", "1 hour"), (r"5\,\Omega", "5 ohms"),
    (r"5 \text{ seconds}", "5 s"), (r"\text{yes}", "Yes."), (r"x=2k+1, k\in\mathbb{Z}", r"2n+1, n \in \mathbb{Z}"),
    (r"\mathrm{Area}=12", "12"), ("S = 12 cm^2", "12"), (r"[0, 2\pi)", r"0\le x<2\pi"),
    ("(0,0), (1,1)", r"(1,1)\text{ and }(0,0)"), (r"\{1, 2\}", "{2, 1}"),
    (r"x \equiv \pm 2 \pmod 5", r"x\equiv 2, 3 \pmod 5"), (r"5\,\mu\mathrm{m}", r"5\times 10^{-6}\text{ m}"),
    ("45 minutes", "0.75 hours"), ("about 12 meters", r"12\text{ m}"), (r"a = 3 \text{ and } b = 4", "(a, b) = (3, 4)"),
    (r"\left\{\begin{aligned} x&=1\\ y&=2\end{aligned}\right.", "(1,2)"),
    (r"\frac{1}{2}\begin{pmatrix}4\\6\end{pmatrix}", r"\begin{pmatrix}2\\3\end{pmatrix}"),
    (r"50\ \mathrm{N\,m}", "50 J"), (r"2.5\,\mathrm{kN}", "2500 N"), (r"\$12 \text{ million}", "12 million dollars"),
    (r"1.5 \text{ dozen}", "18"), (r"72\,\mathrm{km/h}", r"20\,\mathrm{m/s}"),
    (r"(-\infty,1)\cup(1,\infty)", r"\{x\mid x\ne 1\}"),
    (r"(-\infty,0)\cup(0,1)\cup(1,\infty)", r"\mathbb R \setminus\{0,1\}"), (r"f(x)=x^2, x\in\mathbb{R}", "x^2"),
    (r"\frac{\sqrt3}{2}\approx 0.866", r"\frac{\sqrt{3}}{2}"), (r"\dfrac{5}{3}\text{ hours}", "1 hour 40 minutes"),
    ("1 h 40 min", "100 min"), (r"5!\cdot 2^3", "960"), (r"\overline{AB} = 5", "5"),
    (r"m\angle A=30^\circ", r"30^\circ"), (r"\text{I and III}", r"\text{III and I}"), ("I, II", r"\text{I and II}"),
    (r"y = \frac{1}{2}x - 3", "x-2y=6"), ("x^2+y^2-4x=0", "(x-2)^2+y^2=4"), (r"1\text{ or }2", "1, 2"),
    (r"\pi/2 \text{ rad}", r"90^\circ"), ("5 kg m/s", r"5\,\mathrm{kg\cdot m/s}"),
    ("20 kJ/mol", r"20\,\mathrm{kJ\,mol^{-1}}"), (r"\frac12", r"\frac{1}{2}"), (r"(1, \frac{2}{4})", "(1,0.5)"),
    (r"x = 5\text{ cm}", "5"), (r"\frac{\pi}{2}", "0.5\\pi"), (r"\text{East}", "East"), ("5 cm", "5"), ("3 cm^2", "3"),
    ("east", "East"), ("1 and 2", "1,2"), (r"2^3\frac{1}{2}", "4"),
]  # fmt: skip
DIFFERENT = [
    ("x^2", "x^3"), (r"2\pi", "6.28"), ("AB", "BA"), ("a-b", "b-a"), (r"\ln x", r"\log_{10} x"),
    ("10^{10}", "10^{10}+1"), ("2^{100}", "1267650600228229401496703205375"), (r"\infty", r"-\infty"),
    (r"\emptyset", "0"), ("cat", "act"), (r"\text{A and B}", r"\text{A and C}"), ("n(n+1)", "n(n-1)"),
    ("x<3", r"x\le3"), ("y=x", "y=-x"), (r"\sqrt{2}", "2"), (r"\text{May 5}", r"\text{May 6}"), ("5 m", "5 s"),
    ("3.14", r"\pi"), (r"\sqrt{-4}", "2"), (r"e^\pi", r"\pi^e"), ("x>3", "x<-3"), ("B", "8"), ("-x", "x"), ("a", "b"),
    (r"\alpha", r"\beta"), ("sqrt(2)", "sqrt(3)"), ("no", "on"), ("even", "odd"), ("12 apples", "13 apples"),
    (r"\text{Not A}", r"\text{A}"), ("5,000", "5"), (r"x \ge 2", r"x \ge 3"),
    (r"k\pi, k\in\mathbb{Z}", r"2k\pi, k\in\mathbb{Z}"), (r"3\times 4", "34"), ("(-2)^2", "-4"),
    (r"\sum_{k=1}^n k", r"\sum_{k=1}^n k^2"), ("x", "2x"), (r"20\text{ cm}^2", "400"),
    ("__import__('os').system('x')", "0"), ("", "0"), ("6", "6 thousand"), (r"x\equiv 3 \pmod 7", r"x\equiv 4 \pmod 7"),
    ("2:30 a.m.", "2:30 p.m."), ("2 hours 30 minutes", "2 hours"), (r"\{1,\{2\}\}", r"\{1,2\}"),
    (r"\{\{1\}\}", r"\{1\}"), ("(x,y)=(1,2)", "(y,x)=(1,2)"), ("5 m/s", "5 s/m"), ("1<x<2", "(2,1)"),
    (r"2\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"), (r"\approx 3.14", "3.1"),
    ("a to b", "b to a"), (r"\lceil n/2\rceil", r"\lfloor n/2\rfloor"), (r"\lfloor x\rfloor", "x"),
    (r"\lfloor x \rfloor+\lfloor y\rfloor", r"\lfloor x+y\rfloor"), ("5 apples", "5 dollars"),
    ("30 minutes", "30 seconds"), ("$5", "5 cents"), ("5%", "5 dollars"),
    (r"\mathbb{R}\setminus\{2\}", r"\mathbb{R}\setminus\{3\}"), ("x<2 or x>5", "(2,5)"), ("x>2 and x<5", "x>2"),
    (r"2k+1, k\in\mathbb{Z}", r"2k, k\in\mathbb{Z}"), ("C(5,2)", "C(5,1)"), ("f'(x)=2x", "f'(x)=3x"),
    ("f'(2)=5", "f'(3)=6"), ("5^2", "5 cm^2"), (r"90^\circ", "90 radians"), ("no solution", "one solution"),
    ("7 a.m.", "8 a.m."), ("one half", "two"), ("5 thousand", "50000"), ("5 cm and 3 cm", "8 cm"),
    ("5 m and 3 cm", "5 m and 4 cm"), (r"5\text{ m}^2", "5 m"), ("10 N", "10 J"), ("x+c", "x+d"), ("at least 5", "5"),
    ("more than 5", "5"), ("less than 5 cm", "5 cm"), (r"\text{approximately } 5\text{ km}", "5 m"),
    ("100", "100 percent off by 1"), (r"x=1 \text{ or } 2", "x=1"), ("-5", "about 5"), ("3 pm", "3 cm"),
    ("3:00 pm", "15"), ("between 3 and 5", "3"),
    (r"\begin{cases} x & x>0\\ 0 & x\le0\end{cases}", r"\begin{cases} x & x\ge0\\ 0 & x<0\end{cases}"),
    ("x+1 thousand", "x+1"), ("2 m", r"2\mathrm{mm}"), (r"\frac{3}{5}", "3 to 6"), ("2mg", "2g"), ("x_1=5", "x_2=5"),
    (r"\{(1,2)\}", r"\{1,2\}"), ("12 hours and 5 hours", "17 hours"), ("3:32 am", "15:32"), ("2.5 kN", "25 N"),
    ("72 km/h", "72 m/s"), ("50 J", "50 W"), ("1 h 40 min", "1.4 hours"), ("1 h 40 min", "140 min"), ("i-j", "i+j"),
    ("I and II", "I and III"), (r"\{1\},\{2\}", r"\{1,2\}"), ("x=1 or x=2", "x=1 or x=3"), ("90 degrees", "pi radians"),
    ("25 °C", "25 K"), ("20 kJ", "20 J"), (r"\$12 million", r"\$12"), (r"x \equiv 1 \pmod 2", "x=1"), ("5 min", "5 m"),
    (r"\{\}", r"\{\{\}\}"), (r"\{a,\{b,c\}\}", r"\{\{a,b\},c\}"), ("the circle", "the square"), ("twenty", "12"),
    ("C_1", "C_2"), ("5 per hour", "5 per minute"),
    (r"\frac13\begin{pmatrix}1\\2\end{pmatrix}", r"3\begin{pmatrix}1\\2\end{pmatrix}"), ("about 3 to 5", "about 3"),
    ("up to 6", "6"), ("10 m north", "10 m south"), (r"\text{East}", r"\text{West}"), ("(1, 2)", "(2, 1)"),
    ("5 or 6", "6"),
]  # fmt: skip

REFUSED = {  # equal near misses, but the grader does not know
    (r"[1,2]\cup[2,3]", "[1,3]"), (r"\pm 0", "0"), (r"180^\circ-x", "180-x"), (r"7\bmod 3", "1"),
    (r"\max(a,b)", r"\max\{a,b\}"), (r"\vec{AB}", r"\overrightarrow{AB}"), ("The area is 12", "12"), ("half", "1/2"),
}  # fmt: skip


@pytest.mark.parametrize(("per_kind", "seed"), [(42, SEED), pytest.param(200, 1, marks=pytest.mark.full)])
def test_error_rates_on_generated_pairs_are_low(per_kind: int, seed: int) -> None:
    """Allow at most 1 % false negatives and 0.1 % false positives; docs/rewards.md has the figures."""
    pairs = generate_pairs(per_kind, seed)
    wrong = [pair for pair in pairs if same_answer(pair.left, pair.right) != pair.equal]
    false_negatives, false_positives = ([pair for pair in wrong if pair.equal is equal] for equal in (True, False))
    kinds = Counter((pair.kind, pair.equal) for pair in wrong)
    assert len(pairs) >= 2000 and sum(pair.equal for pair in pairs) == len(pairs) / 2
    assert len(false_negatives) <= 0.01 * len(pairs) / 2, kinds
    assert len(false_positives) <= 0.001 * len(pairs) / 2, kinds


def test_generated_pairs_depend_only_on_the_seed_and_on_names_of_kinds() -> None:
    assert len({kind.__name__ for kind in KINDS}) == len(KINDS) > 50
    assert generate_pairs(4) == generate_pairs(4) != generate_pairs(4, seed=1)


@pytest.mark.parametrize("kind", ["by hand", *NEAR_MISSES])
def test_different_answers_are_told_apart_from_spellings_of_one_answer_both_ways(kind: str) -> None:
    same, different = (SAME, DIFFERENT) if kind == "by hand" else NEAR_MISSES[kind]
    refused = [pair for pair in same if not (same_answer(*pair) and same_answer(*pair[::-1]))]
    accepted = [pair for pair in different if same_answer(*pair) or same_answer(*pair[::-1])]
    assert ([pair for pair in refused if pair not in REFUSED], accepted) == ([], [])


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


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{a{b}{c{d}}}e", "a{b}{c{d}}"),
        (r"$\boxed 7$", "7"),
        (r"\boxed{5} and an open \boxed{6", "5"),
        ("42", None),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed {7}", "7"),
        (r"} \boxed{1}", "1"),
        (r"\boxed$", None),
    ],
)
def test_last_boxed_returns_the_last_complete_box(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer
