"""Does the plugin keep its promises? ``docs/testing.md`` lists the tests of each promise."""

import tests.processor

tests.processor.cache_processor_info()
