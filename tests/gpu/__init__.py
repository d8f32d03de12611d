"""Which promises hold on a GPU? ``run_parts.py`` runs these tests on a machine that has one."""
