"""``python -m plpkg`` is ``plpkg``: what ``accelerate launch -m plpkg`` runs."""

from plpkg.cli import app

app()
