"""``python -m plpkg`` is ``plpkg``: what ``accelerate launch -m plpkg`` runs."""

from plpkg.signals import ended_by_ctrl_c


def main() -> None:
    """The command line."""
    with ended_by_ctrl_c():
        from plpkg.cli import app
    app()


if __name__ == "__main__":
    main()
