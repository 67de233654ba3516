"""How Voila serves the explorers: ``make demo``."""

c = get_config()  # noqa: F821 - Jupyter defines it for its settings

c.Voila.tornado_settings = {
    # The page asks another host for icons that it does not show; behind a firewall it would wait for them.
    "headers": {
        "Content-Security-Policy": "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob: ws: wss:; "
        "frame-ancestors 'self'"
    },
    # A page that is left ends its kernel, but Voila 0.5 gives it no token for that. Nobody else knows the kernel's id.
    "disable_check_xsrf": True,
}
c.MappingKernelManager.cull_idle_timeout = 600  # seconds, for the kernels of browsers that were killed
