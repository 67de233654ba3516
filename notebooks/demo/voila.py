"""How Voila serves the explorers: ``make demo``."""

c = get_config()  # noqa: F821

# Voila's page asks another host for icons that it does not show; behind a firewall it would wait for them.
only_from_here = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob: ws: wss:; frame-ancestors 'self'"
c.Voila.tornado_settings = {"headers": {"Content-Security-Policy": only_from_here}}

# A page that is left ends its kernel; this ends those of browsers that could not say so.
c.MappingKernelManager.cull_idle_timeout = 600
