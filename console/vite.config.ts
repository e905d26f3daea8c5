/// <reference types="vitest/config" />
import { svelte } from '@sveltejs/vite-plugin-svelte';
import { defineConfig, loadEnv } from 'vite';

// `CONSOLE_GATEWAY` is the HTTP address of a running gateway, to which `npm run dev` forwards API calls.
const gateway = loadEnv('', '.', 'CONSOLE_')['CONSOLE_GATEWAY'] ?? 'http://127.0.0.1:8080';

export default defineConfig({
  base: '/console/',
  plugins: [svelte()],
  build: {
    outDir: '../services/gateway/console/static',
    emptyOutDir: true,
    // The content security policy allows no fonts or styles from data URLs.
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    // The app is one script, of which a browser receives about a third of this size.
    chunkSizeWarningLimit: 700,
  },
  // The gateway refuses requests whose origin is another address.
  server: { proxy: { '^/console/(api|rpc)/': { target: gateway, changeOrigin: true, headers: { origin: gateway } } } },
  test: { include: ['src/**/*.test.ts'] },
});
