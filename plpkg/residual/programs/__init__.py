"""Programs on top of the wire: ``plpkg cloud``, ``plpkg device``, ``plpkg demo``, and what they load, say and learn."""
