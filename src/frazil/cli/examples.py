"""An example for the help of each command: its name, and what follows it."""

EXAMPLES = {
    "audit": "orders.toml --deep",
    "check": "orders.toml",
    "completeness": "orders.toml 2026-11-15T10 --wait 10m",
    "config explain": "orders.toml",
    "dead-letters list": "orders.toml --kind misfit",
    "dead-letters replay": "orders.toml --dry-run",
    "demo": "--rows 300000",
    "health": "/run/frazil/orders.json --ready",
    "index rebuild": "orders.toml --dry-run",
    "init": "--bootstrap-servers localhost:9092 --topic orders --catalog type=hadoop "
    "--catalog warehouse=/lake",
    "locate": "orders.toml orders 0 61007",
    "offsets accept-loss": "orders.toml --lost orders:0:100..250 --reason 'gone' --apply",
    "offsets adopt-topic": "orders.toml --topic orders --reason 'recreated' --apply",
    "offsets confirm": "orders.toml --table shop.orders --reason 'expired by hand' --apply",
    "offsets seek": "orders.toml --to orders:0:1200 --reason 'read again' --apply",
    "offsets show": "orders.toml",
    "orphans": "orders.toml --older-than 3d --remove",
    "plan": "orders.toml",
    "rewind": "orders.toml --to batch:17 --dry-run",
    "run": "orders.toml --metrics 127.0.0.1:9464",
    "selftest": "orders.toml --rows 5000",
    "status": "orders.toml --watch",
}
