"""Run a script that creates models by timm, such as timm's own train.py, with NaLaFormer known."""

import argparse
import runpy
import sys
from pathlib import Path

from mmnala.engine.tools import fail


def main() -> None:
    parser = argparse.ArgumentParser('python -m mmnala.timm_models', description=__doc__)
    parser.add_argument('script', help='Python file, run as by `python SCRIPT ARGS...`')
    parser.add_argument('args', nargs=argparse.REMAINDER, help='its arguments')
    args = parser.parse_args()
    script = Path(args.script)
    if not script.is_file():
        fail(f'script {args.script}: expected an existing Python file')
    sys.argv = [args.script, *args.args]
    sys.path.insert(0, str(script.resolve().parent))
    runpy.run_path(args.script, run_name='__main__')


if __name__ == '__main__':
    main()
