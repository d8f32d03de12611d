import tests.processor

tests.processor.cache_processor_info()
