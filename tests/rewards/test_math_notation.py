"""Comparison of answers in the notations of olympiads, school books and physics: pairs written by hand."""

import pytest

from penstock.stages.rewards.builtin.math_answer import same_answer
from tests.rewards.answer_pairs import KINDS

SAME = [
    (r"x \equiv 3 \pmod 7", "x ≡ 3 (mod 7)"), (r"3 \pmod 7", r"x\equiv 10 \mod 7"), ("approximately 3.14", "3.14"),
    (r"\approx 3.14\text{ cm}", "3.14 cm"), ("2 hours 30 minutes", "2.5 hours"),
    ("1 hour and 15 minutes", "75 minutes"), ("3 to 5", r"3\text{ to }5"), ("3 to 5", "3:5"),
    ("2:30 p.m.", "2:30 PM"), (r"2:30\text{ p.m.}", "2:30 pm"), (r"\begin{cases}x=1\\y=2\end{cases}", "x=1, y=2"),
    ("(x,y)=(1,2)", "x=1,y=2"), ("(x,y)=(1,2)", r"\begin{cases}x=1\\y=2\end{cases}"),
    (r"2\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}2&4\\6&8\end{pmatrix}"),
    (r"\left<1,2\right>", r"\langle 1,2\rangle"), (r"5\frac{\text{m}}{\text{s}}", "5 m/s"),
    (r"5\,\mathrm{m}\,\mathrm{s}^{-1}", r"5\text{ m/s}"), ("6 thousand", "6000"), ("6 thousand", "6,000"),
    (r"\$1.2 \text{ million}", "1200000"), ("3.5 hours", "3 hours 30 minutes"),
    ("90 minutes", r"1\frac12 \text{ hours}"), (r"1:30\text{ hours}", "1:30 hours"), ("25%", "0.25"),
    (r"\frac{1}{4}", "25 percent"), ("noon", "noon"), ("Tuesday", r"\text{tuesday}"),
    (r"\text{Monday, March 4}", r"\text{Monday, March 4}"), ("y=2x+1", "2x-y+1=0"),
    (r"(-\infty,-2)\cup(-2,\infty)", r"\mathbb{R}\setminus\{-2\}"), (r"x\ne 2, x\ne 3", r"\mathbb R\setminus\{2,3\}"),
    (r"\{1,2,3\}", "1, 2, 3"), (r"\left\{-1,\frac12\right\}", r"x=-1 \text{ or } x=\frac12"),
    (r"\frac{\pi}{3}+2\pi k, k\in\mathbb{Z}", r"\frac{\pi}{3}+2\pi n, n\in\mathbb Z"), (r"\sqrt{3}:1", r"\sqrt3 : 1"),
    ("1:2:3", "1 : 2 : 3"), ("1:2:3", "1 to 2 to 3"),
    (r"\text{between } 3 \text{ and } 5", r"\text{between }3\text{ and }5"),
    (r"16\pi \text{ cubic inches}", r"16\pi\text{ in}^3"), (r"12\text{ cm}^2", "12 square centimeters"),
    ("10 m/s^2", r"10\,\mathrm{m/s^2}"), (r"4.5\times10^{-7}\ \mathrm{m}", r"450\,\mathrm{nm}"),
    (r"1.6\times 10^{-19}\,\mathrm{C}", "1.6e-19 C"), ("100 km/h", r"100\,\mathrm{km/h}"), ("36 km/h", "10 m/s"),
    (r"30^\circ", r"\frac{\pi}{6}"), (r"\angle ABC = 45^\circ", "45"), ("1011_2", r"1011_{\text{two}}"),
    (r"\lfloor n/2 \rfloor", r"\lceil (n-1)/2 \rceil"), (r"\frac{dy}{dx}=3x^2", "3x^2"), ("f'(x)=3x^2", "3x^2"),
    ("x^3+C", "x^3+c"), (r"\frac13\begin{bmatrix}3\\6\end{bmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
    ("A(1,2)", "(1,2)"), (r"\vec{v}=(1,2)", "(1,2)"), ("DNE", "does not exist"), ("twelve", "12"), ("5th", "5"),
    ("0.(3)", r"\frac13"), (r"0.\dot{3}", r"0.\overline{3}"), (r"3\text{ ft }6\text{ in}", "42 inches"),
    (r"\text{Option C}", "C"), (r"x>2 \text{ and } x<5", "(2,5)"), ("2<x<5", r"x\in(2,5)"),
    (r"\frac{3}{4}\text{ mile}", "0.75 miles"),
    (r"\begin{cases} x+y=1 \\ x-y=2 \end{cases}", r"\begin{cases}x-y=2\\x+y=1\end{cases}"),
    (r"\ce{H2SO4}", r"\text{H}_2\text{SO}_4"), (r"20\ \mathrm{kg \cdot m/s}", r"20\text{ kg m/s}"),
    ("7:05 AM", "7:05 a.m."), (r"\text{5 hours 20 minutes}", "5 h 20 min"), (r"\sin^{-1}(x)", r"\arcsin x"),
    (r"n \equiv 1 \text{ or } 5 \pmod{6}", r"n\equiv \pm 1 \pmod 6"), ("2^{10}", "1024"),
    ("(3, 4)", r"\left(3,4\right)"), ("x=3, y=4", "(3,4)"), ("x=1,y=2,z=3", "(x,y,z)=(1,2,3)"),
    ("a = 2, b = -3", "a=2,b=-3"), (r"\text{Approximately }12.5\%", "12.5%"), ("$3.50", "3.50 dollars"),
    ("350 cents", r"\$3.50"), (r"-\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}-1\\-2\end{pmatrix}"),
    (r"\mathbf{5}", "5"), (r"(2, \pi/3)", r"\left(2,\frac{\pi}{3}\right)"), ("six thousand", "6000"),
    (r"60\,\mathrm{min}", "1 hour"), (r"5\,\Omega", "5 ohms"), (r"5 \text{ seconds}", "5 s"), ("3 m", "300 cm"),
    (r"\text{yes}", "Yes."), (r"x=2k+1, k\in\mathbb{Z}", r"2n+1, n \in \mathbb{Z}"), (r"\mathrm{Area}=12", "12"),
    ("S = 12 cm^2", "12"), (r"\binom{10}{3}", "120"), (r"12 \text{ noon}", "12 noon"), (r"[0, 2\pi)", r"0\le x<2\pi"),
    ("(0,0), (1,1)", r"(1,1)\text{ and }(0,0)"), (r"\{1, 2\}", "{2, 1}"),
    (r"x \equiv \pm 2 \pmod 5", r"x\equiv 2, 3 \pmod 5"), ("US$5", r"\$5"),
    (r"5\,\mu\mathrm{m}", r"5\times 10^{-6}\text{ m}"), (r"\mathbb{R}", "all real numbers"), (r"\frac{2}{3}", "⅔"),
]  # fmt: skip
DIFFERENT = [
    ("6", "6 thousand"), (r"\lfloor n/8\rfloor", r"\lfloor (n+1)/8\rfloor"), (r"\emptyset", r"\{\emptyset\}"),
    ("6 thousand", "6 million"), ("6", "6 million"), ("5", "5 hundred"), (r"x\equiv 3 \pmod 7", r"x\equiv 3\pmod 8"),
    (r"x\equiv 3 \pmod 7", r"x\equiv 4 \pmod 7"), ("2:30 a.m.", "2:30 p.m."), ("3 to 5", "5 to 3"),
    ("2 hours 30 minutes", "2.3 hours"), ("2 hours 30 minutes", "2 hours"), ("2 hours 30 minutes", "30 minutes"),
    (r"\{1,\{2\}\}", r"\{1,2\}"), (r"\{\{1\}\}", r"\{1\}"), ("x=1,y=2", "x=2,y=1"), ("(x,y)=(1,2)", "(y,x)=(1,2)"),
    ("5 m/s", "5 s/m"), ("5 m/s", "5 m"), ("5 km", "5 m"), ("5 m", "5 cm"),
    (r"\left<1,2\right>", r"\left<2,1\right>"), ("1<x<2", "(2,1)"),
    (r"2\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"), (r"\approx 3.14", "3.1"),
    ("about 5", "about 6"), ("a to b", "b to a"), (r"\lceil n/2\rceil", r"\lfloor n/2\rfloor"),
    (r"\lfloor x\rfloor", "x"), (r"\lfloor x \rfloor+\lfloor y\rfloor", r"\lfloor x+y\rfloor"),
    ("5 apples", "5 dollars"), ("30 minutes", "30 seconds"), ("1 hour", "1 minute"), ("$5", "5 cents"),
    ("5%", "5 dollars"), (r"\mathbb{R}\setminus\{2\}", r"\mathbb{R}\setminus\{3\}"),
    (r"\mathbb R", r"\mathbb R\setminus\{0\}"), ("x<2 or x>5", "(2,5)"), ("x>2 and x<5", "x>2"),
    (r"2k+1, k\in\mathbb{Z}", r"2k, k\in\mathbb{Z}"), ("C(5,2)", "C(5,1)"), ("1011_2", "1011_3"),
    ("June 4", "June 5"), ("4 June", "4 July"), ("a_1=5,a_2=7", "a_1=7,a_2=5"), ("f'(x)=2x", "f'(x)=3x"),
    ("y'=2x", "y=3x"), ("f'(2)=5", "f'(3)=6"), ("5^2", "5 cm^2"), (r"90^\circ", "90 radians"),
    ("no solution", "one solution"), ("0", r"\emptyset"), (r"\{0\}", r"\emptyset"), ("12:30", "30:12"),
    ("1 to 2", "1:3"), ("7 a.m.", "7 p.m."), ("7 a.m.", "8 a.m."), ("5 feet 3 inches", "5 feet 4 inches"),
    ("5 feet 3 inches", "5.3 feet"), ("H_2O", "H_2O_2"), ("two", "three"), ("one half", "two"),
    ("5 thousand", "50000"), ("5 cm and 3 cm", "8 cm"), ("5 m and 3 cm", "5 m and 4 cm"), (r"5\text{ m}^2", "5 m"),
    ("10 N", "10 J"), ("x+c", "x+d"), ("3 dozen", "3"), ("Bob", "Bobs"), ("not 5", "5"), ("at least 5", "5"),
    ("more than 5", "5"), ("less than 5 cm", "5 cm"), (r"\text{approximately } 5\text{ km}", "5 m"),
    ("100", "100 percent off by 1"), ("a circle", "not a circle"), (r"x=1 \text{ or } 2", "x=1"), ("-5", "about 5"),
    ("3 pm", "3 cm"), ("3:00 pm", "15"), ("between 3 and 5", "3"), ("(1,2)", "<2,1>"),
    (r"\begin{cases} x & x>0\\ 0 & x\le0\end{cases}", r"\begin{cases} x & x\ge0\\ 0 & x<0\end{cases}"),
    ("x+1 thousand", "x+1"), ("2 m", r"2\mathrm{mm}"), (r"\frac{3}{5}", "3 to 6"), ("2mg", "2g"), ("x_1=5", "x_2=5"),
    ("(1,2)", "[1,2]"), (r"\{(1,2)\}", r"\{1,2\}"), ("12 hours and 5 hours", "17 hours"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"), ("3:32", "15:32"),
    ("3:32 am", "15:32"),
]  # fmt: skip


@pytest.mark.parametrize(("left", "right"), SAME)
def test_equal_notations_are_equal_both_ways(left: str, right: str) -> None:
    assert same_answer(left, right) and same_answer(right, left)


@pytest.mark.parametrize(("left", "right"), DIFFERENT)
def test_near_misses_are_different_both_ways(left: str, right: str) -> None:
    assert not same_answer(left, right) and not same_answer(right, left)


def test_kinds_of_generated_pairs_have_unique_names() -> None:
    assert len({kind.__name__ for kind in KINDS}) == len(KINDS) > 150
