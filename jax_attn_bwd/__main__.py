"""Lists the commands: `python -m jax_attn_bwd`."""

import jax_attn_bwd
from jax_attn_bwd._core import console

COMMANDS = (
    ("python -m jax_attn_bwd.check", "every operator beside float64 on this machine, in a minute or two"),
    (
        "python -m jax_attn_bwd.check --enable",
        "proves and times the kernels of this GPU or TPU, for calls to pick",
    ),
    ("python -m jax_attn_bwd.check --help", "what else it takes: operators, dtypes, JSON"),
    ("python -m tests.bench --help", "in a clone: time and memory beside the peers, and random programs"),
)


def main() -> None:
    """Prints them."""
    print(console.columns(f"jax_attn_bwd {jax_attn_bwd.__version__}, commands:", COMMANDS))
    print("In Python, jax_attn_bwd.explain(function, *arguments) tells what a call runs, and why.")


if __name__ == "__main__":
    main()
