"""Runs vLLM's workers on a further node of an engine: `python -m ... --headless FLAG ...`.

The flags are those of `vllm serve`, which ends at once where vLLM is installed under another name,
as it is for CPUs.
"""

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main() -> None:
    """Run until a worker ends."""
    cli_env_setup()
    parser = make_arg_parser(FlexibleArgumentParser())
    ServeSubcommand.cmd(parser.parse_args())


if __name__ == "__main__":
    main()
