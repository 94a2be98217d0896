"""Create a random bf16 model whose widths are multiples of 128, as fp8 engines need."""

import sys

from penstock.flows.commands.demo_model import make_tiny_model

if __name__ == "__main__":
    make_tiny_model(sys.argv[1], dtype="bfloat16", groups=4)
