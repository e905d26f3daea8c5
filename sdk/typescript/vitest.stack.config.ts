import { defineConfig } from 'vitest/config';
import config from './vitest.config.js';

// The tests in stack/ need a running stack; tests/e2e/sdk/test_typescript.py starts one.
export default defineConfig({ ...config, test: { include: ['stack/**/*.test.ts'], testTimeout: 120_000 } });
