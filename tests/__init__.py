"""Does the plugin keep its promises? ``pytest -m P1 --collect-only`` lists the tests of one."""

import tests.processor

tests.processor.cache_processor_info()
