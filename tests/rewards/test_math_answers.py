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
    (r"\begin{pmatrix} -1 \\ 3 \end{pmatrix}", r"\begin{pmatrix}-1\\3\end{pmatrix}"), (r"\pi r^2", r"\pi r^{2}"),
    (r"2\cdot x+1", "2x+1"), (r"12\,\text{cm}", "12"), ("413_8", "413_{8}"), (r"x \le 3", r"x \leq 3"),
    (r"\dbinom{5}{2}", r"\binom{5}{2}"), (r"\alpha + \beta", r"\beta+\alpha"), (r"20\text{ cm}^2", "20"),
    ("5 million", "5000000"), ("2, 1", "1 and 2"), (r"\frac{1}{2}", r"\frac{1}{2}."), (r"x \in [-2,7]", "[-2,7]"),
    (r"2:30\text{ p.m.}", "2:30 p.m."), (r"10\sqrt{3}\text{ units}", r"10\sqrt3"),
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
    ("C_1 e^x + C_2 e^{-x}", "C_2e^{-x}+C_1e^{x}"), (r"\ln|x| + C", r"C+\ln\left|x\right|"),
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
    (r"\frac{e^x-e^{-x}}{2}", r"\sinh x"), (r"x \equiv 3 \pmod 7", "x ≡ 3 (mod 7)"),
    (r"3 \pmod 7", r"x\equiv 10 \mod 7"), ("approximately 3.14", "3.14"), (r"\approx 3.14\text{ cm}", "3.14 cm"),
    ("2 hours 30 minutes", "2.5 hours"), ("1 hour and 15 minutes", "75 minutes"), ("3 to 5", r"3\text{ to }5"),
    ("3 to 5", "3:5"), ("2:30 p.m.", "2:30 PM"), (r"2:30\text{ p.m.}", "2:30 pm"),
    (r"\begin{cases}x=1\\y=2\end{cases}", "x=1, y=2"), ("(x,y)=(1,2)", "x=1,y=2"),
    ("(x,y)=(1,2)", r"\begin{cases}x=1\\y=2\end{cases}"),
    (r"2\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}2&4\\6&8\end{pmatrix}"),
    (r"\left<1,2\right>", r"\langle 1,2\rangle"), (r"5\frac{\text{m}}{\text{s}}", "5 m/s"),
    (r"5\,\mathrm{m}\,\mathrm{s}^{-1}", r"5\text{ m/s}"), ("6 thousand", "6000"), ("6 thousand", "6,000"),
    (r"\$1.2 \text{ million}", "1200000"), ("3.5 hours", "3 hours 30 minutes"),
    ("90 minutes", r"1\frac12 \text{ hours}"), (r"1:30\text{ hours}", "1:30 hours"), ("25%", "0.25"),
    (r"\frac{1}{4}", "25 percent"), ("noon", "noon"), ("Tuesday", r"\text{tuesday}"),
    (r"\text{Monday, March 4}", r"\text{Monday, March 4}"),
    (r"(-\infty,-2)\cup(-2,\infty)", r"\mathbb{R}\setminus\{-2\}"), (r"x\ne 2, x\ne 3", r"\mathbb R\setminus\{2,3\}"),
    (r"\{1,2,3\}", "1, 2, 3"), (r"\left\{-1,\frac12\right\}", r"x=-1 \text{ or } x=\frac12"),
    (r"\frac{\pi}{3}+2\pi k, k\in\mathbb{Z}", r"\frac{\pi}{3}+2\pi n, n\in\mathbb Z"), (r"\sqrt{3}:1", r"\sqrt3 : 1"),
    ("1:2:3", "1 : 2 : 3"), ("1:2:3", "1 to 2 to 3"),
    (r"\text{between } 3 \text{ and } 5", r"\text{between }3\text{ and }5"),
    (r"16\pi \text{ cubic inches}", r"16\pi\text{ in}^3"), (r"12\text{ cm}^2", "12 square centimeters"),
    ("10 m/s^2", r"10\,\mathrm{m/s^2}"), (r"4.5\times10^{-7}\ \mathrm{m}", r"450\,\mathrm{nm}"),
    (r"1.6\times 10^{-19}\,\mathrm{C}", "1.6e-19 C"), ("100 km/h", r"100\,\mathrm{km/h}"), ("36 km/h", "10 m/s"),
    (r"\angle ABC = 45^\circ", "45"), ("1011_2", r"1011_{\text{two}}"),
    (r"\lfloor n/2 \rfloor", r"\lceil (n-1)/2 \rceil"), (r"\frac{dy}{dx}=3x^2", "3x^2"), ("f'(x)=3x^2", "3x^2"),
    ("x^3+C", "x^3+c"), (r"\frac13\begin{bmatrix}3\\6\end{bmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
    ("A(1,2)", "(1,2)"), (r"\vec{v}=(1,2)", "(1,2)"), ("twelve", "12"), ("5th", "5"), ("0.(3)", r"\frac13"),
    (r"0.\dot{3}", r"0.\overline{3}"), (r"3\text{ ft }6\text{ in}", "42 inches"), (r"\text{Option C}", "C"),
    (r"x>2 \text{ and } x<5", "(2,5)"), ("2<x<5", r"x\in(2,5)"), (r"\frac{3}{4}\text{ mile}", "0.75 miles"),
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
    (r"5\,\mu\mathrm{m}", r"5\times 10^{-6}\text{ m}"), (r"\frac{2}{3}", "⅔"), ("45 minutes", "0.75 hours"),
    (r"\text{3 hours}", "180 min"), (r"x\equiv 5\ (\mathrm{mod}\ 12)", r"x\equiv 5 \pmod{12}"),
    ("about 12 meters", r"12\text{ m}"), ("10:15 AM", r"10:15\text{ a.m.}"), ("4 to 1", r"4\text{ to }1"),
    ("(a,b)=(3,4)", "a=3, b=4"), (r"a = 3 \text{ and } b = 4", "(a, b) = (3, 4)"),
    (r"\left\{\begin{aligned} x&=1\\ y&=2\end{aligned}\right.", "(1,2)"),
    (r"\frac{1}{2}\begin{pmatrix}4\\6\end{pmatrix}", r"\begin{pmatrix}2\\3\end{pmatrix}"),
    (r"\left<3,-1,2\right>", r"\langle 3,-1,2 \rangle"), (r"9.8\,\frac{\mathrm m}{\mathrm s^2}", r"9.8\text{ m/s}^2"),
    (r"50\ \mathrm{N\,m}", "50 J"), (r"2.5\,\mathrm{kN}", "2500 N"), ("4 hundred", "400"), ("2.5 thousand", "2500"),
    (r"\$12 \text{ million}", "12 million dollars"), (r"1.5 \text{ dozen}", "18"),
    (r"72\,\mathrm{km/h}", r"20\,\mathrm{m/s}"), (r"x=-3,\ x=4", "-3, 4"), (r"\{-3,4\}", r"x \in \{4,-3\}"),
    (r"(-\infty,1)\cup(1,\infty)", r"\{x\mid x\ne 1\}"), (r"\mathbb{R}\setminus\{0,1\}", r"x\ne 0,1"),
    (r"(-\infty,0)\cup(0,1)\cup(1,\infty)", r"\mathbb R \setminus\{0,1\}"), (r"f(x)=x^2, x\in\mathbb{R}", "x^2"),
    (r"\frac{\sqrt3}{2}\approx 0.866", r"\frac{\sqrt{3}}{2}"), (r"\dfrac{5}{3}\text{ hours}", "1 hour 40 minutes"),
    ("1 h 40 min", "100 min"), (r"5!\cdot 2^3", "960"), (r"\log_{10} 2", r"\frac{\ln 2}{\ln 10}"),
    ("i-j", r"\mathbf{i}-\mathbf{j}"), (r"\overline{AB} = 5", "5"), (r"m\angle A=30^\circ", r"30^\circ"),
    (r"\text{(i) } 5", r"\text{(i) } 5"), (r"\text{I and III}", r"\text{III and I}"), ("I, II", r"\text{I and II}"),
    (r"y = \frac{1}{2}x - 3", "x-2y=6"), ("x^2+y^2-4x=0", "(x-2)^2+y^2=4"), (r"1\text{ or }2", "1, 2"),
    ("even", r"\text{Even}"), (r"\text{12 cups}", "12 cups"), (r"\frac{17}{50}", "34%"), ("0.34", r"34\%"),
    (r"\pi/2 \text{ rad}", r"90^\circ"), ("5 kg m/s", r"5\,\mathrm{kg\cdot m/s}"),
    ("20 kJ/mol", r"20\,\mathrm{kJ\,mol^{-1}}"), (r"25^{\circ}\mathrm{C}", "25 °C"),
    (r"n\ge 3, n\in\mathbb{Z}", r"n \geq 3, n \in \mathbb Z"), ("42", "42.0"), (r"\dfrac{1}{2}", "0.5"),
    (r"\frac12", r"\frac{1}{2}"), (r"\left( 1, 2 \right]", "(1,2]"), (r"(1, \frac{2}{4})", "(1,0.5)"),
    (r"x = 5\text{ cm}", "5"), (r"1{,}234", "1234"), ("10,000", "10000"), (r"90^\circ", "90"),
    (r"\sqrt{8}", r"2\sqrt{2}"), ("(x+1)^2", "x^2+2x+1"), (r"\frac{\pi}{2}", "0.5\\pi"), ("3!", "6"),
    (r"-\frac{1}{3}", r"\frac{-1}{3}"), (r"\text{East}", "East"), ("1, 2", "1,2"), (r"\sin^2(x)+1", r"\sin^2(x)+1"),
    (r"7\frac{3}{4}", "7.75"), ("7 3/4", r"\frac{31}{4}"), (r"-2\frac12", "-2.5"), ("5 cm", "5"), ("12 inches", "12"),
    ("3 cm^2", "3"), ("east", "East"), ("1 and 2", "1,2"), ("2 or 3", "2, 3"), ("1 and 2", "2,1"),
    (r"2^3\frac{1}{2}", "4"),
]  # fmt: skip
DIFFERENT = [
    ("x^2", "x^3"), (r"\frac13", "0.33"), (r"2\pi", "6.28"), ("AB", "BA"), ("a-b", "b-a"), ("(x-1)^2", "x^2-1"),
    (r"\ln x", r"\log_{10} x"), ("10^{10}", "10^{10}+1"), ("2^{100}", "1267650600228229401496703205375"),
    (r"\infty", r"-\infty"), (r"\emptyset", "0"), ("cat", "act"), ("5 kg", "5 g"),
    (r"\text{A and B}", r"\text{A and C}"), ("n(n+1)", "n(n-1)"), ("x<3", r"x\le3"), ("y=x", "y=-x"), ("x=1", "x=-1"),
    ("3!", "3"), (r"\frac12", r"\frac{12}{1}"), (r"\sqrt{2}", "2"), ("1,2", "1,2,2"),
    (r"\text{May 5}", r"\text{May 6}"), ("5 m", "5 s"), ("12:30", "12:03"), ("3.14", r"\pi"), (r"\sqrt{-4}", "2"),
    ("0.999", "1"), ("1", "1.0000001"), ("a_1", "a_2"), ("x_1", "x"), (r"e^\pi", r"\pi^e"), ("x>3", "x<-3"), ("B", "8"),
    ("O", "0"), (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"), ("10", "100"), ("-x", "x"),
    ("x+1=0", "x+2=0"), ("100", "10^3"), ("5%", "5/10"), ("2", "x=3"), ("f(2)", "f(3)"), ("[0,1)", "(0,1]"),
    (r"30^\circ", r"60^\circ"), ("1:2", "1:3"), ("a", "b"), (r"\alpha", r"\beta"), (r"\sin x", r"\sin y"),
    ("sqrt(2)", "sqrt(3)"), ("no", "on"), ("even", "odd"), ("12 apples", "13 apples"), (r"\frac{x}{y}", r"\frac{y}{x}"),
    ("2,3", "(2,3)"), (r"\text{Not A}", r"\text{A}"), ("5,000", "5"), ("5,000", "5.000"), ("1.5", "15"),
    (r"x \ge 2", r"x \ge 3"), (r"k\pi, k\in\mathbb{Z}", r"2k\pi, k\in\mathbb{Z}"), (r"3\times 4", "34"), ("2^3", "8.5"),
    ("-2^2", "4"), ("(-2)^2", "-4"), (r"\sum_{k=1}^n k", r"\sum_{k=1}^n k^2"), (r"\int_0^1 x dx", r"\int_0^2 x dx"),
    ("x", "2x"), ("1/2", "2"), ("6/3/2", "4"), ("7", "7i"), ("10 cm", "10 cm^2"), (r"20\text{ cm}^2", "400"),
    ("413_8", "413"), ("5 million", "5"), ("7 3/4", "73/4"), ("__import__('os').system('x')", "0"),
    ("9" * 400, "8" * 400), ("", "0"), ("6", "6 thousand"), (r"\lfloor n/8\rfloor", r"\lfloor (n+1)/8\rfloor"),
    (r"\emptyset", r"\{\emptyset\}"), ("6 thousand", "6 million"), ("6", "6 million"), ("5", "5 hundred"),
    (r"x\equiv 3 \pmod 7", r"x\equiv 3\pmod 8"), (r"x\equiv 3 \pmod 7", r"x\equiv 4 \pmod 7"),
    ("2:30 a.m.", "2:30 p.m."), ("3 to 5", "5 to 3"), ("2 hours 30 minutes", "2.3 hours"),
    ("2 hours 30 minutes", "2 hours"), ("2 hours 30 minutes", "30 minutes"), (r"\{1,\{2\}\}", r"\{1,2\}"),
    (r"\{\{1\}\}", r"\{1\}"), ("(x,y)=(1,2)", "(y,x)=(1,2)"), ("5 m/s", "5 s/m"), ("5 m/s", "5 m"), ("5 m", "5 cm"),
    (r"\left<1,2\right>", r"\left<2,1\right>"), ("1<x<2", "(2,1)"),
    (r"2\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"), (r"\approx 3.14", "3.1"),
    ("about 5", "about 6"), ("a to b", "b to a"), (r"\lceil n/2\rceil", r"\lfloor n/2\rfloor"),
    (r"\lfloor x\rfloor", "x"), (r"\lfloor x \rfloor+\lfloor y\rfloor", r"\lfloor x+y\rfloor"),
    ("5 apples", "5 dollars"), ("30 minutes", "30 seconds"), ("1 hour", "1 minute"), ("$5", "5 cents"),
    ("5%", "5 dollars"), (r"\mathbb{R}\setminus\{2\}", r"\mathbb{R}\setminus\{3\}"),
    (r"\mathbb R", r"\mathbb R\setminus\{0\}"), ("x<2 or x>5", "(2,5)"), ("x>2 and x<5", "x>2"),
    (r"2k+1, k\in\mathbb{Z}", r"2k, k\in\mathbb{Z}"), ("C(5,2)", "C(5,1)"), ("1011_2", "1011_3"), ("June 4", "June 5"),
    ("4 June", "4 July"), ("a_1=5,a_2=7", "a_1=7,a_2=5"), ("f'(x)=2x", "f'(x)=3x"), ("y'=2x", "y=3x"),
    ("f'(2)=5", "f'(3)=6"), ("5^2", "5 cm^2"), (r"90^\circ", "90 radians"), ("no solution", "one solution"),
    (r"\{0\}", r"\emptyset"), ("12:30", "30:12"), ("1 to 2", "1:3"), ("7 a.m.", "7 p.m."), ("7 a.m.", "8 a.m."),
    ("5 feet 3 inches", "5 feet 4 inches"), ("5 feet 3 inches", "5.3 feet"), ("H_2O", "H_2O_2"), ("two", "three"),
    ("one half", "two"), ("5 thousand", "50000"), ("5 cm and 3 cm", "8 cm"), ("5 m and 3 cm", "5 m and 4 cm"),
    (r"5\text{ m}^2", "5 m"), ("10 N", "10 J"), ("x+c", "x+d"), ("3 dozen", "3"), ("Bob", "Bobs"), ("at least 5", "5"),
    ("more than 5", "5"), ("less than 5 cm", "5 cm"), (r"\text{approximately } 5\text{ km}", "5 m"),
    ("100", "100 percent off by 1"), ("a circle", "not a circle"), (r"x=1 \text{ or } 2", "x=1"), ("-5", "about 5"),
    ("3 pm", "3 cm"), ("3:00 pm", "15"), ("between 3 and 5", "3"), ("(1,2)", "<2,1>"),
    (r"\begin{cases} x & x>0\\ 0 & x\le0\end{cases}", r"\begin{cases} x & x\ge0\\ 0 & x<0\end{cases}"),
    ("x+1 thousand", "x+1"), ("2 m", r"2\mathrm{mm}"), (r"\frac{3}{5}", "3 to 6"), ("2mg", "2g"), ("x_1=5", "x_2=5"),
    (r"\{(1,2)\}", r"\{1,2\}"), ("12 hours and 5 hours", "17 hours"), ("3:32", "15:32"), ("3:32 am", "15:32"),
    ("45 minutes", "0.7 hours"), ("5 mod 12", "5 mod 13"), ("about 12", "about 13"), ("10:15 AM", "10:15 PM"),
    ("4 to 1", "1 to 4"), ("a=3,b=4", "a=4,b=3"), (r"\left<3,1\right>", r"\left<1,3\right>"), ("2.5 kN", "25 N"),
    ("4 hundred", "4"), ("2 dozen", "2"), ("72 km/h", "72 m/s"), ("50 J", "50 W"), ("1 h 40 min", "1.4 hours"),
    ("1 h 40 min", "140 min"), (r"\mathbb R\setminus\{0\}", r"\mathbb R\setminus\{1\}"), ("(0,1)", "[0,1]"),
    ("i-j", "i+j"), ("I and II", "I and III"), (r"\{1\},\{2\}", r"\{1,2\}"), ("x=1 or x=2", "x=1 or x=3"),
    ("34%", "3.4"), ("90 degrees", "pi radians"), ("25 °C", "25 K"), ("20 kJ", "20 J"), (r"\$12 million", r"\$12"),
    (r"x \equiv 1 \pmod 2", "x=1"), ("5 min", "5 m"), ("5 mi", "5 m"), ("3 hours 5 minutes", "5 hours 3 minutes"),
    ("2:05", "2:50"), (r"\lfloor n/3\rfloor+1", r"\lfloor (n+2)/3\rfloor"),
    (r"\lceil n/3\rceil", r"\lfloor n/3\rfloor+1"), (r"\{\}", r"\{\{\}\}"), (r"\{a,\{b,c\}\}", r"\{\{a,b\},c\}"),
    ("(1,(2,3))", "(1,2,3)"), ("the circle", "the square"), ("June 4", "4 July"), ("twenty", "12"), ("C_1", "C_2"),
    (r"x>1 \text{ or } x<3", "(1,3)"), ("5 per hour", "5 per minute"),
    (r"\frac13\begin{pmatrix}1\\2\end{pmatrix}", r"3\begin{pmatrix}1\\2\end{pmatrix}"), ("about 3 to 5", "about 3"),
    ("more than 6", "6"), ("6 or more", "6"), ("up to 6", "6"), ("6 more", "6 less"), ("6 left", "6 right"),
    ("10 north", "10 south"), ("10 m north", "10 m south"), ("42", "43"), ("(1,2]", "[1,2]"), ("(1,2)", "(2,1)"),
    ("stop", "pots"), (r"\text{East}", r"\text{West}"), ("0.33", r"\frac{1}{3}"), ("x", "y"), ("1/0", "5"),
    ("(1, 2)", "(2, 1)"), ("5 or 6", "6"),
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
    assert len(pairs) >= 3000 and sum(pair.equal for pair in pairs) == len(pairs) / 2
    assert len(false_negatives) <= 0.01 * len(pairs) / 2, kinds
    assert len(false_positives) <= 0.001 * len(pairs) / 2, kinds


def test_generated_pairs_depend_only_on_the_seed_and_on_names_of_kinds() -> None:
    assert len({kind.__name__ for kind in KINDS}) == len(KINDS) > 80
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
