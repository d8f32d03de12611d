import tests.processor

tests.processor.asked_once()
