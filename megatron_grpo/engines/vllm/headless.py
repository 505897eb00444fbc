"""Runs vLLM's workers on a further node of an engine: `python -m ... --headless FLAG ...`.

The flags are those of `vllm serve`. That command ends at once if vLLM's package has another name,
as on CPUs.
"""

import os
import sys

# By the command's module: the parser's own module differs between vLLM 0.32 and 0.33.
from vllm.entrypoints.cli.serve import ServeSubcommand, make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main() -> None:
    """Run until a worker ends, which is an error."""
    # As in every command of vLLM: CUDA does not work in forked workers.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    parser = make_arg_parser(FlexibleArgumentParser())
    ServeSubcommand.cmd(parser.parse_args())
    sys.exit("a worker of this node has ended")


if __name__ == "__main__":
    main()
