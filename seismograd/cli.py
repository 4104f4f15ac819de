"""The command ``seismograd``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import seismograd
from seismograd import incident_command, replay_command, serve_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="seismograd", description="Monitoring for the RL post-training of language models."
    )
    parser.add_argument("--version", action="version", version=f"seismograd {seismograd.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="train a real language model with GRPO, watched, with one planted fault")
    from seismograd.demo.options import add_arguments

    add_arguments(demo)
    incident = commands.add_parser("incident", help="show a localised spike, or write it as a web page")
    incident_command.add_arguments(incident)
    replay = commands.add_parser("replay", help="localise saved micro-batches again, with the weights of a checkpoint")
    replay_command.add_arguments(replay)
    serve = commands.add_parser("serve", help="show the runs of a folder in the browser, live")
    serve_command.add_arguments(serve)
    args = parser.parse_args(argv)
    if args.command == "incident":
        return incident_command.show_incident(args)
    if args.command == "replay":
        return replay_command.replay(args)
    if args.command == "serve":
        return serve_command.serve(args)
    # Imported only when it runs: it needs TRL and Transformers.
    from seismograd.demo.run import run_demo

    return run_demo(args)


if __name__ == "__main__":
    sys.exit(main())
