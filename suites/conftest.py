"""What a suite needs: flowbench's fixture, also where flowbench is not installed but stands beside the suites."""

pytest_plugins = ["flowbench.pytest_plugin"]
