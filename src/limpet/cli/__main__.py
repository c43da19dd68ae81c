"""``python -m limpet.cli``."""

from limpet.cli import main

main(prog_name="limpet")
