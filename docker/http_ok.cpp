// A health check for an image without a shell: http_ok PORT PATH exits with 0 if http://127.0.0.1:PORT/PATH answers 200.
#include <arpa/inet.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

int main(int argc, char** argv) {
    if (argc != 3) {
        std::fputs("usage: http_ok PORT PATH\n", stderr);
        return 2;
    }
    sockaddr_in where{};
    where.sin_family = AF_INET;
    where.sin_port = htons(static_cast<uint16_t>(std::atoi(argv[1])));
    where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int connection = socket(AF_INET, SOCK_STREAM, 0);
    const timeval limit{2, 0};
    setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(connection, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    if (connect(connection, reinterpret_cast<const sockaddr*>(&where), sizeof where) != 0) {
        std::perror("connect");
        return 1;
    }
    char request[512];
    const int length = std::snprintf(request, sizeof request, "GET %s HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n", argv[2]);
    if (length >= static_cast<int>(sizeof request) || write(connection, request, length) != length) {
        return 1;
    }
    char answer[13] = {};  // "HTTP/1.1 200"
    size_t have = 0;
    while (have < 12) {
        const ssize_t got = read(connection, answer + have, 12 - have);
        if (got <= 0) {
            return 1;
        }
        have += static_cast<size_t>(got);
    }
    std::printf("%s\n", answer);
    return std::strncmp(answer, "HTTP/1.", 7) == 0 && std::strcmp(answer + 8, " 200") == 0 ? 0 : 1;
}
